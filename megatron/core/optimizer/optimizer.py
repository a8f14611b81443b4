"""The optimizer of a model: gradient norm, clipping and the update of the main weights, in one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp import FlatAdamW, fully_shard_optimizer
from megatron.core.optimizer.clip_grads import (
    clip_factor,
    clip_grad_by_total_norm,
    count_zeros,
    get_grad_norm,
    get_params_norm,
)
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.param_groups import get_param_groups
from megatron.core.process_groups_config import ProcessGroupCollection


class StepResult(NamedTuple):
    """The result of a step; tensors stay on the device until they are read."""

    update_successful: bool
    grad_norm: Tensor
    """Gradient norm before clipping, []."""
    num_zeros_in_grad: Tensor | None
    """Number of zeros in the gradient, []; None where they are not counted."""


class MegatronOptimizer:
    """A ``torch.optim`` optimizer over main weights whose step also computes the gradient norm and clips."""

    def __init__(self, optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> None:
        self.optimizer = optimizer
        self.config = config

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def get_parameters(self) -> list[Tensor]:
        """Return all parameters, in the order of the parameter groups."""
        return [param for group in self.param_groups for param in group["params"]]

    @torch.no_grad()
    def step(self) -> StepResult:
        """Update the main weights from the clipped gradients.

        ``FlatAdamW`` clips gradients as it reads them and leaves ``param.grad`` unchanged; other optimizers clip in place.

        Ranks: all ranks of the gradients' meshes; does not block the host.
        """
        if isinstance(self.optimizer, FlatAdamW):
            return self._flat_step(self.optimizer)
        params = self.get_parameters()
        grad_norm = get_grad_norm(params)
        if self.config.clip_grad > 0:
            clip_grad_by_total_norm(params, self.config.clip_grad, grad_norm)
        num_zeros = count_zeros(params) if self.config.log_num_zeros_in_grad else None
        self.optimizer.step()
        return StepResult(True, grad_norm, num_zeros)

    def _flat_step(self, optimizer: FlatAdamW) -> StepResult:
        grad_norm = optimizer.grad_norm()
        factor = clip_factor(grad_norm, self.config.clip_grad) if self.config.clip_grad > 0 else None
        num_zeros = count_zeros(self.get_parameters()) if self.config.log_num_zeros_in_grad else None
        optimizer.step(grad_factor=factor)
        return StepResult(True, grad_norm, num_zeros)

    def update_hyperparameters(self) -> None:
        """Copy the current rates of ``param_groups`` to the device, before a captured step; ``step`` does it itself.

        Raises:
            NotImplementedError: this optimizer passes rates to kernels as numbers, which a CUDA graph would repeat.
        """
        if not isinstance(self.optimizer, FlatAdamW):
            raise NotImplementedError(
                f"a captured step needs learning rates on the device, got {type(self.optimizer).__name__} without them; use "
                "FlatAdamW (--optimizer adam), or train eagerly (--cuda-graph-impl none)"
            )
        self.optimizer.refresh_hyperparameters()

    def synchronize(self) -> None:
        """Make the current stream wait for the last step's updates of weights and state. Does not block the host."""
        if isinstance(self.optimizer, FlatAdamW):
            self.optimizer.synchronize()

    def params_norm(self) -> Tensor:
        """Compute the norm [] of all main weights; with remainders, of their bf16 upper halves. Ranks: as ``step``."""
        self.synchronize()
        return get_params_norm(self.get_parameters())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or fill them with zeros with ``set_to_none=False``."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)


def get_megatron_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[torch.nn.Module],
    config_overrides: None = None,
    use_gloo_process_groups: bool = True,
    pg_collection: ProcessGroupCollection | None = None,
    dump_param_to_param_group_map: None = None,
) -> MegatronOptimizer:
    """Build the optimizer over all trainable parameters of the model.

    Adam over a model that is sharded as a whole is ``FlatAdamW``; other optimizers are torch's.

    Args:
        config: ``lr`` must be set.
        model_chunks: the parts of the model, wrapped by ``FullyShardedDataParallel`` or plain modules.
        config_overrides, dump_param_to_param_group_map: must be None.
        use_gloo_process_groups, pg_collection: without effect: parameters know the ranks that share them.

    Raises:
        NotImplementedError: other settings for some parameters, or a dump of the groups, are asked for.
        ValueError: ``config.lr`` is None, nothing is trainable, or ``store_param_remainders`` is set for a model that is not
            sharded as a whole.

    Ranks: local.
    """
    asked = {"config_overrides": config_overrides, "dump_param_to_param_group_map": dump_param_to_param_group_map}
    for name, value in asked.items():
        if value:
            raise NotImplementedError(f"get_megatron_optimizer({name}=...) is not served, got {value!r}")
    if config.lr is None:
        raise ValueError("OptimizerConfig.lr must be set, got None; pass the largest learning rate of the schedule")
    named = [item for chunk in model_chunks for item in chunk.named_parameters()]
    of_model: Any = getattr(model_chunks[0], "config", None)
    width_mult: float = of_model.mup_width_mult if getattr(of_model, "use_mup", False) else 1.0
    groups = get_param_groups(named, config, width_mult=width_mult)
    params = [param for group in groups for param in group["params"]]
    if config.optimizer == "adam" and FlatAdamW.serves(params):
        return MegatronOptimizer(_flat_adamw(config, groups), config)
    if config.store_param_remainders:
        raise ValueError(
            "store_param_remainders needs a model whose parameters are all sharded by the engine, got others; wrap it with "
            "FullyShardedDataParallel"
        )
    optimizer = _torch_optimizer(config, groups, fused=_can_fuse(params))
    if any(isinstance(param, DTensor) for param in params):
        # Without it the next forward would read the model weights of before the step.
        optimizer = fully_shard_optimizer(optimizer)
    return MegatronOptimizer(optimizer, config)


def _can_fuse(params: Sequence[Tensor]) -> bool:
    return all(param.device.type == "cuda" and param.is_floating_point() for param in params)


def _flat_adamw(config: OptimizerConfig, groups: list[dict[str, Any]]) -> FlatAdamW:
    return FlatAdamW(
        groups,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        store_param_remainders=config.store_param_remainders,
        overlaps_forward=config.overlap_update_with_forward,
    )


def _torch_optimizer(config: OptimizerConfig, groups: list[dict[str, Any]], *, fused: bool) -> torch.optim.Optimizer:
    kernel = {"fused": True} if fused else {"foreach": True}
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, momentum=config.sgd_momentum, **kernel)
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(groups, betas=betas, eps=config.adam_eps, **kernel)
