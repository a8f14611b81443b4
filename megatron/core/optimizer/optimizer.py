"""The optimizer of a model: gradient norm, clipping and the update of the main weights, in one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp import FlatAdamW, FlatMuon, fully_shard_optimizer, group_of
from megatron.core.module_names import named_parameters
from megatron.core.optimizer.clip_grads import (
    clip_factor,
    clip_grad_by_total_norm,
    count_zeros,
    get_grad_norm,
    get_params_norm,
    scale_gradients,
)
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler, MegatronGradScaler
from megatron.core.optimizer.muon import flat_muon
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.param_groups import get_param_groups
from megatron.core.optimizer.param_overrides import ConfigOverrides, get_overridden_param_groups
from megatron.core.optimizer.sharded_state import sharded_optimizer_state, with_steps_of_parameters
from megatron.core.process_groups_config import ProcessGroupCollection


class StepResult(NamedTuple):
    """The result of a step; tensors stay on the device until they are read."""

    update_successful: bool
    """False: gradients overflowed under the loss scale, and the step was skipped."""
    grad_norm: Tensor | None
    """Gradient norm before clipping, []; None of a step that was skipped."""
    num_zeros_in_grad: Tensor | None
    """Number of zeros in the gradient, []; None where they are not counted."""


class LaunchedStep(NamedTuple):
    """The results of a step that the host has not waited for; all are on the device."""

    found_inf: Tensor | None
    """[1] fp32: not 0 if the step was skipped, the same on all ranks; None: there is no loss scale, and no step is skipped."""
    grad_norm: Tensor
    """Gradient norm before clipping, without the loss scale, []; not finite of a step that was skipped."""
    num_zeros_in_grad: Tensor | None


class NotServedError(NotImplementedError, AttributeError):
    """A method of Megatron-Core's optimizers that is not served; ``hasattr`` tells it too."""


_STATE = "dist_checkpointing.save and load take sharded_state_dict(), and torch.save takes state_dict()"
_HOST = "use OptimizerConfig(optimizer_cpu_offload=True), which keeps state in the host's memory in every step"
_GROUPS = "norms are sums over several process groups; call get_grad_norm() or count_zeros()"
_NOT_SERVED = {
    "offload_to_cpu": _HOST,
    "restore_from_cpu": _HOST,
    "save_parameter_state": _STATE,
    "load_parameter_state": _STATE,
    "get_parameter_state_dp_zero": _STATE,
    "get_parameter_state_dp_reshardable": _STATE,
    "get_grads_for_grad_norm": _GROUPS,
    "get_main_grads_for_grad_norm": _GROUPS,
    "get_grad_stats_parallel_group": _GROUPS,
    "optimizer": "a chain of several optimizers has none of its own; ask chained_optimizers for each",
}
"""Why, and the way out."""


class MegatronOptimizer:
    """A ``torch.optim`` optimizer over main weights whose step also computes the gradient norm and clips.

    Args:
        init_state_fn: must be None: loading a checkpoint makes the state that it needs.
        grad_scaler: the scale of the losses that gradients come from. A step undoes it, is skipped where a gradient is not
            finite, and updates the scale. None: losses are not scaled.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: OptimizerConfig,
        init_state_fn: object = None,
        *,
        grad_scaler: MegatronGradScaler | None = None,
    ) -> None:
        if init_state_fn is not None:
            raise NotImplementedError(
                f"init_state_fn must be None, got {init_state_fn!r}: loading a checkpoint makes the state that it needs;"
                " leave it out (a grad_scaler is given by name)"
            )
        self.optimizer = optimizer
        self.config = config
        self.grad_scaler = grad_scaler

    def __getattr__(self, name: str) -> Any:
        if name in _NOT_SERVED:
            raise NotServedError(f"{type(self).__name__}.{name} is not served: {_NOT_SERVED[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    is_stub_optimizer = False
    """Whether there is nothing to train on this rank: never; such a model is refused."""

    @property
    def chained_optimizers(self) -> list[MegatronOptimizer]:
        """The optimizers of which this one consists: itself."""
        return [self]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        """The state of torch's optimizer, by parameter."""
        return self.optimizer.state

    def get_parameters(self) -> list[Tensor]:
        """Return all parameters, in the order of the parameter groups."""
        return [param for group in self.param_groups for param in group["params"]]

    def get_loss_scale(self) -> Tensor:
        """Return the loss scale [1] fp32 on the device; with a scaler always the same tensor."""
        if self.grad_scaler is not None:
            return self.grad_scaler.scale
        return torch.ones(1, dtype=torch.float32, device=_local_device(self.get_parameters()))

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale: what backward must start from."""
        return loss if self.grad_scaler is None else self.grad_scaler.scale.view(()) * loss

    def step(self) -> StepResult:
        """Update the main weights from the clipped gradients, or skip the step where they overflowed under the loss scale.

        ``FlatAdamW`` scales and clips gradients as it reads them and leaves ``param.grad`` unchanged; other optimizers do so
        in place.

        Ranks: all ranks of the gradients' meshes; without a loss scale does not block the host.
        """
        found_inf, grad_norm, num_zeros = self.launch_step()
        if found_inf is not None and bool(found_inf):
            return StepResult(False, None, None)
        return StepResult(True, grad_norm, num_zeros)

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """Undo the loss scale in the gradients in place, and update it; return whether a gradient is not finite.

        With ``step_with_ready_grads`` it is Megatron-Core's ``step`` in parts, without clipping. Ranks: as ``step``; with a
        loss scale blocks the host.
        """
        if self.grad_scaler is None:
            return False
        params = self.get_parameters()
        _, found_inf, inverse = self._unscaled(get_grad_norm(params))
        assert found_inf is not None and inverse is not None
        scale_gradients(params, inverse)
        self.grad_scaler.update(found_inf)
        return bool(found_inf)

    def step_with_ready_grads(self) -> bool:
        """Update the main weights from the gradients as they are; return True. Ranks: all ranks of the gradients' meshes."""
        self.optimizer.step()
        return True

    @torch.no_grad()
    def launch_step(self) -> LaunchedStep:
        """Do what ``step`` does; what became of it stays on the device.

        Ranks: as ``step``; with ``FlatAdamW`` does not block the host, other optimizers do with a loss scale.
        """
        if isinstance(self.optimizer, FlatAdamW):
            return self._launch_flat_step(self.optimizer)
        params = self.get_parameters()
        grad_norm, found_inf, inverse = self._unscaled(get_grad_norm(params))
        if found_inf is None or not bool(found_inf):
            if inverse is not None:
                scale_gradients(params, inverse)
            if self.config.clip_grad > 0:
                clip_grad_by_total_norm(params, self.config.clip_grad, grad_norm)
        num_zeros = count_zeros(params) if self.config.log_num_zeros_in_grad else None
        if found_inf is None or not bool(found_inf):
            self.optimizer.step()
        self._end_of_scale(found_inf)
        return LaunchedStep(found_inf, grad_norm, num_zeros)

    def _launch_flat_step(self, optimizer: FlatAdamW) -> LaunchedStep:
        grad_norm, found_inf, factor = self._unscaled(optimizer.grad_norm())
        if self.config.clip_grad > 0:
            clip = clip_factor(grad_norm, self.config.clip_grad)
            factor = clip if factor is None else factor * clip
        num_zeros = count_zeros(self.get_parameters()) if self.config.log_num_zeros_in_grad else None
        optimizer.step(grad_factor=factor, found_inf=found_inf)
        self._end_of_scale(found_inf)
        return LaunchedStep(found_inf, grad_norm, num_zeros)

    def _unscaled(self, grad_norm: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the norm without the loss scale, whether a gradient is not finite, and the factor that undoes the scale.

        The norm is over the whole model and the same on all ranks. So is what follows from it, without a reduction of its
        own. It is taken of the scaled gradients: their squares overflow only where gradients are far out of range.
        """
        if self.grad_scaler is None:
            return grad_norm, None, None
        inverse = self.grad_scaler.inv_scale
        return grad_norm * inverse.view(()), (~torch.isfinite(grad_norm)).float().view(1), inverse

    def _end_of_scale(self, found_inf: Tensor | None) -> None:
        if self.grad_scaler is not None:
            assert found_inf is not None
            self.grad_scaler.update(found_inf)

    @torch.no_grad()
    def get_grad_norm(self) -> Tensor:
        """Compute the norm [] of the whole model's gradient as it is, on the device. Ranks: as ``step``; does not block the host."""
        return get_grad_norm(self.get_parameters())

    @torch.no_grad()
    def clip_grad_norm(self, clip_grad: float) -> Tensor:
        """Scale gradients in place so that their norm is at most ``clip_grad``, 0: leave them; return the norm before, [].

        ``step`` clips itself, by ``config.clip_grad``; this goes with ``step_with_ready_grads``. Ranks: as ``step``.
        """
        params = self.get_parameters()
        grad_norm = get_grad_norm(params)
        if clip_grad > 0:
            clip_grad_by_total_norm(params, clip_grad, grad_norm)
        return grad_norm

    @torch.no_grad()
    def count_zeros(self) -> Tensor:
        """Count the zeros in the whole model's gradient: [] fp32, on the device. Ranks: as ``step``."""
        return count_zeros(self.get_parameters())

    def has_grad_norm_group(self, grad_norm_group: str) -> bool:
        """Return whether some parameters are clipped by a norm of their own: no, one norm is over all."""
        return False

    def reload_model_params(self, state_dict: None = None) -> None:
        """Let the next forward and step take the parameters as they are now, whoever wrote them.

        Args:
            state_dict: must be None.

        Raises:
            NotImplementedError: a ``state_dict`` is given.

        Ranks: all.
        """
        if state_dict is not None:
            raise NotImplementedError(
                "reload_model_params takes no state_dict: parameters are the main weights; call load_state_dict of the model"
            )
        groups = dict.fromkeys(group for param in self.get_parameters() if (group := group_of(param)) is not None)
        contexts = dict.fromkeys(group.context() for group in groups if group.context is not None)
        for context in contexts:
            if context is not None:
                context.weights_changed()

    def prepare_model_params_for_param_sync(self) -> None:
        """Do nothing: weights are gathered from where the step writes them."""

    def update_hyperparameters(self) -> None:
        """Copy the current rates of ``param_groups`` to the device, before a captured step; ``step`` does it itself.

        Raises:
            NotImplementedError: this optimizer passes rates to kernels as numbers, which a CUDA graph would repeat.
        """
        if not isinstance(self.optimizer, FlatAdamW) or isinstance(self.optimizer, FlatMuon):
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
        """Return the optimizer's state, with that of the loss scale as ``grad_scaler`` if there is one."""
        state = self.optimizer.state_dict()
        return state if self.grad_scaler is None else {**state, "grad_scaler": self.grad_scaler.state_dict()}

    def sharded_state_dict(
        self,
        model_sharded_state_dict: dict[str, Any] | None = None,
        is_loading: bool = False,
        metadata: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> dict[str, Any]:
        """Return the state for ``dist_checkpointing.save`` and ``load``; ``load_state_dict`` takes what is loaded.

        Args:
            model_sharded_state_dict: ``sharded_state_dict`` of the model.
            is_loading: make state that is not there yet.
            metadata: accepted; each tensor lies as its weight does, whatever kind of sharding it names.

        Raises:
            ValueError: a parameter is not in ``model_sharded_state_dict``; there is no state to load into.

        Ranks: each alone.
        """
        found = sharded_optimizer_state(self.optimizer, model_sharded_state_dict or {}, is_loading=is_loading)
        return found if self.grad_scaler is None else {**found, "grad_scaler": self.grad_scaler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned; a loss scale that is not in it stays."""
        scale = state_dict.get("grad_scaler")
        own = {key: value for key, value in state_dict.items() if key != "grad_scaler"}
        self.optimizer.load_state_dict(with_steps_of_parameters(own))
        if self.grad_scaler is not None and scale is not None:
            self.grad_scaler.load_state_dict(scale)


class DistributedOptimizer(MegatronOptimizer):
    """A ``MegatronOptimizer`` whose state is sharded over data-parallel ranks; ``get_megatron_optimizer`` makes it."""


def get_megatron_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[torch.nn.Module],
    config_overrides: ConfigOverrides | None = None,
    use_gloo_process_groups: bool = True,
    pg_collection: ProcessGroupCollection | None = None,
    dump_param_to_param_group_map: None = None,
) -> MegatronOptimizer:
    """Build the optimizer over all trainable parameters of the model.

    Adam over a model that is sharded as a whole is ``FlatAdamW``, and Muon ``FlatMuon``; other optimizers are torch's.

    Args:
        config: ``lr`` must be set.
        model_chunks: the parts of the model, wrapped by ``FullyShardedDataParallel`` or plain modules.
        config_overrides: settings of some parameters, instead of ``get_standard_config_overrides(config)``, to which they are
            added where weight decay should leave out biases and vectors. Rates that scale with the width are then those of
            ``get_mup_config_overrides``.
        dump_param_to_param_group_map: must be None.
        use_gloo_process_groups, pg_collection: without effect: parameters know the ranks that share them.

    Raises:
        NotImplementedError: another optimizer for some parameters, or a dump of the groups, is asked for.
        ValueError: ``config.lr`` is None, nothing is trainable, or ``store_param_remainders`` is set, or the optimizer is Muon,
            for a model that is not sharded as a whole; main gradients are not in ``config.main_grads_dtype``.

    Ranks: local.
    """
    if dump_param_to_param_group_map:
        raise NotImplementedError(
            f"dump_param_to_param_group_map must be None, got {dump_param_to_param_group_map!r}: look at param_groups"
        )
    if config.lr is None:
        raise ValueError("OptimizerConfig.lr must be set, got None; pass the largest learning rate of the schedule")
    named = [item for chunk in model_chunks for item in named_parameters(chunk)]
    of_model: Any = getattr(model_chunks[0], "config", None)
    width_mult: float = of_model.mup_width_mult if getattr(of_model, "use_mup", False) else 1.0
    if config_overrides is None:
        groups = get_param_groups(named, config, width_mult=width_mult)
    else:
        groups = get_overridden_param_groups(named, config, config_overrides)
    params = [param for group in groups for param in group["params"]]
    kind = DistributedOptimizer if any(_is_sharded(param) for param in params) else MegatronOptimizer
    if config.optimizer == "adam" and FlatAdamW.serves(params):
        _check_main_grads(config, params)
        return kind(_flat_adamw(config, groups), config, grad_scaler=_grad_scaler(config, params))
    if config.optimizer == "muon":
        return kind(flat_muon(config, groups, named, of_model), config, grad_scaler=_grad_scaler(config, params))
    if config.optimizer_cpu_offload:
        raise ValueError(
            "optimizer_cpu_offload needs a model whose parameters are all sharded by the engine, got others; wrap it with "
            "FullyShardedDataParallel"
        )
    if config.store_param_remainders or config.keeps_small_moments:
        raise ValueError(
            f"{'store_param_remainders' if config.store_param_remainders else 'exp_avg_dtype'} needs a model whose parameters are all sharded by the engine, got others; wrap it with "
            "FullyShardedDataParallel"
        )
    optimizer = _torch_optimizer(config, groups, fused=_can_fuse(params))
    if any(isinstance(param, DTensor) for param in params):
        # Without it the next forward would read the model weights of before the step.
        optimizer = fully_shard_optimizer(optimizer)
    return kind(optimizer, config, grad_scaler=_grad_scaler(config, params))


def _is_sharded(param: Tensor) -> bool:
    return isinstance(param, DTensor) and not all(placement.is_replicate() for placement in param.placements)


def _grad_scaler(config: OptimizerConfig, params: Sequence[Tensor]) -> MegatronGradScaler | None:
    device = _local_device(params)
    if config.loss_scale is not None:
        return ConstantGradScaler(config.loss_scale, device=device)
    if not config.fp16:
        return None
    return DynamicGradScaler(
        initial_scale=config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=int(config.loss_scale_window),
        hysteresis=config.hysteresis,
        device=device,
    )


def _local_device(params: Sequence[Tensor]) -> torch.device:
    return params[0].device


def _can_fuse(params: Sequence[Tensor]) -> bool:
    return all(param.device.type == "cuda" and param.is_floating_point() for param in params)


def _check_main_grads(config: OptimizerConfig, params: Sequence[Tensor]) -> None:
    groups = (group_of(param) for param in params)
    others = {group.dtypes.main_grads for group in groups if group is not None} - {config.main_grads_dtype}
    if others and config.main_grads_dtype != torch.float32:
        raise ValueError(
            f"main_grads_dtype {config.main_grads_dtype} needs main gradients in that dtype, got {others.pop()}; set "
            "DistributedDataParallelConfig.megatron_fsdp_main_grads_dtype too"
        )


def _flat_adamw(config: OptimizerConfig, groups: list[dict[str, Any]]) -> FlatAdamW:
    return FlatAdamW(
        groups,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        store_param_remainders=config.store_param_remainders,
        exp_avg_dtype=config.exp_avg_dtype,
        exp_avg_sq_dtype=config.exp_avg_sq_dtype,
        overlaps_forward=config.overlap_update_with_forward,
        offload_fraction=config.optimizer_offload_fraction if config.optimizer_cpu_offload else 0.0,
        pins_gradients=config.pin_cpu_grads,
        pins_weights=config.pin_cpu_params,
        overlaps_host_updates=config.overlap_cpu_optimizer_d2h_h2d,
    )


def _torch_optimizer(config: OptimizerConfig, groups: list[dict[str, Any]], *, fused: bool) -> torch.optim.Optimizer:
    kernel = {"fused": True} if fused else {"foreach": True}
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, momentum=config.sgd_momentum, **kernel)
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(groups, betas=betas, eps=config.adam_eps, **kernel)
