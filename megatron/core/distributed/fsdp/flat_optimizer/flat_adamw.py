"""AdamW over this rank's flat shards: one kernel for each parameter group of the engine, which also casts for the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp.api.optimizer import check_step, contexts_of_groups, groups_of
from megatron.core.distributed.fsdp.api.state_dict_hooks import local_rows
from megatron.core.distributed.fsdp.buffers.param_slots import each
from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup, group_of
from megatron.core.distributed.fsdp.dtensor.local_parts import placed_like
from megatron.core.distributed.fsdp.flat_optimizer.adamw_update import join, make_update
from megatron.core.distributed.fsdp.flat_optimizer.flat_norm import FlatGradNorm, has_gradient
from megatron.core.distributed.fsdp.flat_optimizer.flat_state import REMAINDER, STEP, FlatState
from megatron.core.distributed.fsdp.flat_optimizer.hyperparameter_table import HyperparameterTable

_MAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class FlatAdamW(torch.optim.Optimizer):
    """``torch.optim.AdamW`` for the parameters of a model after ``fully_shard``, which reads and writes each once.

    A group of the engine is one flat buffer here, so a step is one kernel for each: it takes the gradient in the
    dtype that it has, clips it, updates state and main weight in fp32, and writes the model weight. State is fp32
    whatever the dtypes are, is there from the start, and is found in ``state`` by parameter under torch's names, as
    DTensors that are views of flat buffers: checkpoints go to ``torch.optim.AdamW`` and come from there.

    Args:
        params: all trainable parameters of units of the engine, or param groups, which may differ in ``lr``, ``betas``,
            ``eps`` and ``weight_decay``. Schedulers write ``param_groups[i]["lr"]``.
        store_param_remainders: main weights in bf16 are the upper halves of fp32 ones, whose lower halves (int16) are
            state of the optimizer. Takes 2 bytes per parameter less than fp32 main weights beside bf16 ones, and needs
            no cast. Training is that of fp32 main weights but for ties: the bf16 weight is the fp32 one rounded, a tie
            away from zero, where a cast goes to the even neighbour. Needs bf16 parameters and
            ``MixedPrecisionPolicy(main_params_dtype=None)``. Whoever writes to weights between steps sets the
            remainders of their group to zero (writes through ``.data`` are not seen), so load weights first and this
            optimizer's state afterwards.
        overlaps_forward: ``step`` returns while updates still run beside the next forward, each unit of which waits for
            its own. Until that forward, or ``synchronize()``, nobody may read or write parameters, state or gradients;
            ``state_dict``, ``load_state_dict``, checkpoints and the model's ``load_state_dict`` see to that themselves.

    Raises:
        ValueError: a parameter is not of a unit of the engine, or not all of a unit's are given, or they have a dtype
            that is not served; ``store_param_remainders`` where main weights are not bf16; a rate is out of range.

    A step is refused where ``fully_shard_optimizer`` refuses it, which this optimizer does not need. A parameter without
    gradient counts as one of zero if others of its group have one; a group without any is left alone. Two runs are
    bitwise equal. On the CPU a step equals ``torch.optim.AdamW(foreach=True)`` to the last bit, for fp32 main weights.
    """

    checks_its_steps = True  # fully_shard_optimizer has nothing to add

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        store_param_remainders: bool = False,
        overlaps_forward: bool = False,
    ) -> None:
        _check_rates(lr, betas, eps, weight_decay)
        rates = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        self._is_built = False
        super().__init__(params, {**rates, **_TORCH_DEFAULTS})
        self.overlaps_forward = overlaps_forward
        groups = groups_of(self)
        _check_parameters(self.param_groups, groups)
        device = groups[0].device
        self._update = make_update(device)
        self._states = [
            FlatState(group, keeps_remainder=_keeps_remainder(group, store_param_remainders)) for group in groups
        ]
        self._state_of = {id(group): state for group, state in zip(groups, self._states, strict=True)}
        self._parameters = [parameter for group in groups for parameter in group.sharded]
        self._cohorts = HyperparameterTable(self.param_groups, groups, device)
        self._grad_norm = FlatGradNorm(groups)
        self._no_factor = torch.ones(1, dtype=torch.float32, device=device)
        self._lay_out()
        self.refresh_hyperparameters()
        self._is_built = True

    @staticmethod
    def serves(parameters: Iterable[torch.Tensor]) -> bool:
        """True if ``FlatAdamW`` can train these parameters: all are sharded by the engine, in dtypes that fp32 can hold."""
        return all(group_of(parameter) is not None and parameter.dtype in _MAIN_DTYPES for parameter in parameters)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if getattr(self, "_is_built", False):
            raise NotImplementedError(
                "FlatAdamW lays its state out once, got another param group; build it over all parameters"
            )
        super().add_param_group(param_group)

    # ---- the step -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, grad_factor: torch.Tensor | None = None) -> Any:
        """Afterwards main and model weights have taken a step, or will have before the forward that reads them.

        Args:
            closure: runs forward and backward; what it returns is returned.
            grad_factor: [] or [1] fp32 on the device; gradients count as multiplied by it. ``param.grad`` stays as it is.

        Raises:
            RuntimeError: a pass is under way, or has failed, or was not a step's last microbatch.

        Ranks: all that hold the parameters; does not block the host.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.groups
        check_step(groups)
        self.synchronize()
        active = [has_gradient(group) for group in groups]
        stepping = [group for group, is_active in zip(groups, active, strict=True) if is_active]
        self._cohorts.set_active({index for index, is_active in enumerate(active) if is_active})
        self.refresh_hyperparameters()
        factor = self._no_factor if grad_factor is None else grad_factor
        self._update.write_coefficients(self._cohorts.table, factor)
        for group in stepping:
            self._state_of[id(group)].drop_stale_remainder(group)
        for context in contexts_of_groups(groups):
            mine = [group for group in stepping if group.context is not None and group.context() is context]
            context.update_weights(mine, self._update_group, overlaps=self.overlaps_forward)
        return loss

    def _update_group(self, group: FsdpParameterGroup) -> None:
        shard = self._state_of[id(group)].shard(group)
        self._update.update(shard, group.grads.main_storage.flat, self._cohorts.table.coefficients)

    def refresh_hyperparameters(self) -> None:
        """Afterwards the device knows the hyperparameters as they are now, for replays of a graph; ``step`` calls it.

        Raises:
            NotImplementedError: a variant of AdamW that is not served.
            RuntimeError: something changed while a graph is captured.
        """
        self._cohorts.refresh(self.param_groups)

    def grad_norm(self) -> torch.Tensor:
        """[] fp32 2-norm of all gradients, on the device. Ranks: all that hold the parameters; does not block the host."""
        return self._grad_norm()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Afterwards there are no gradients, and they take no memory; or they are zero (``set_to_none=False``)."""
        if not set_to_none:
            self.synchronize()
            super().zero_grad(set_to_none=False)
            return
        each(setattr, self._parameters, repeat("grad"), repeat(None))
        for group in self.groups:
            group.grads.free_main_if_cleared()

    def synchronize(self) -> None:
        """Afterwards work on the current stream sees weights and state as the last step leaves them. Does not block."""
        for context in contexts_of_groups(self.groups):
            context.finish_updates()

    @property
    def groups(self) -> list[FsdpParameterGroup]:
        """The engine's groups that still exist."""
        return [group for state in self._states if (group := state.group()) is not None]

    # ---- state --------------------------------------------------------------------------------------------------

    def main_weights(self, parameter: torch.Tensor) -> DTensor:
        """The parameter's fp32 main weights as a DTensor placed like it; a copy, where they are kept in two halves."""
        self.synchronize()
        assert isinstance(parameter, DTensor)
        remainder = self.state[parameter].get(REMAINDER)
        if remainder is None:
            return parameter.detach().float()  # type: ignore[return-value]
        return placed_like(parameter, join(parameter._local_tensor.detach(), remainder._local_tensor))

    def state_dict(self) -> dict[str, Any]:
        self.synchronize()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Afterwards the state is that of ``state_dict``, of this class or of ``torch.optim.AdamW``.

        Raises:
            ValueError: other parameters, or state of another kind.
        """
        # torch would cast state to the parameter's dtype; what it does not know it leaves alone.
        kept = {
            index: {key: _Kept(value) for key, value in entries.items()}
            for index, entries in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": kept})
        for parameter, entries in self.state.items():
            self.state[parameter] = {key: kept.value for key, kept in entries.items()}
        self.adopt_state()

    @torch.no_grad()
    def adopt_state(self) -> None:
        """Afterwards the flat buffers hold what somebody has put into ``state``, zeros where it has nothing.

        Raises:
            ValueError: state of another kind, or of another shape than its parameter.
        """
        self.synchronize()
        steps: dict[torch.Tensor, float] = {}
        for group, state in self._living():
            for parameter, views in zip(group.sharded, state.views, strict=True):
                given = self.state.get(parameter, {})
                _check_state(given, views, parameter)
                steps[parameter] = float(given.get(STEP, 0.0))
                for key, view in views.items():
                    _fill(view, given.get(key), parameter)
            state.note_version(group)
        if self._cohorts.assign(steps):
            self._lay_out()
        self._show_state()

    def _living(self) -> list[tuple[FsdpParameterGroup, FlatState]]:
        return [(group, state) for state in self._states if (group := state.group()) is not None]

    def _lay_out(self) -> None:
        """Afterwards each group's update knows its cohorts."""
        for group, state in self._living():
            state.lay_out(group, [self._cohorts.of_parameter[p] for p in group.sharded], self._update)
        self._show_state()

    def _show_state(self) -> None:
        for group, state in self._living():
            for parameter, views in zip(group.sharded, state.views, strict=True):
                self.state[parameter] = {STEP: self._cohorts.step_of(parameter), **views}


# What torch.optim.AdamW has besides, so that checkpoints go both ways.
_TORCH_DEFAULTS = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}


@dataclass(frozen=True)
class _Kept:
    """State on its way past torch's ``load_state_dict``."""

    value: Any


def _check_rates(lr: float | torch.Tensor, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not isinstance(value, torch.Tensor) and value < 0:
            raise ValueError(f"{name} must not be negative, got {value}")
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be in [0, 1), got {betas}")


def _check_parameters(param_groups: Sequence[dict[str, Any]], groups: Sequence[FsdpParameterGroup]) -> None:
    given = {parameter for group in param_groups for parameter in group["params"]}
    foreign = [list(parameter.shape) for parameter in given if group_of(parameter) is None]
    if foreign or not groups:
        raise ValueError(
            f"FlatAdamW must be given trainable parameters of units of the engine, got {len(foreign)} others of shapes "
            f"{foreign[:4]}; call fully_shard first, or use torch.optim.AdamW"
        )
    for group in groups:
        left_out = [group.name_of(i) for i, parameter in enumerate(group.sharded) if parameter not in given]
        if left_out:
            raise ValueError(
                f"FlatAdamW must be given all trainable parameters of a unit, got {group} without {', '.join(left_out[:4])}; "
                "freeze them before fully_shard, or use torch.optim.AdamW"
            )
        if group.dtypes.main_params not in _MAIN_DTYPES:
            raise ValueError(
                f"FlatAdamW computes in fp32, got main weights of {group} in {group.dtypes.main_params}; use torch.optim.AdamW"
            )


def _keeps_remainder(group: FsdpParameterGroup, asked: bool) -> bool:
    if not asked or group.dtypes.main_params == group.dtypes.compute == torch.float32:
        return False
    if group.dtypes.main_params != torch.bfloat16 or group.dtypes.compute != torch.bfloat16:
        raise ValueError(
            f"store_param_remainders needs bf16 main weights of a bf16 model, got {group.dtypes.main_params} of "
            f"{group.dtypes.compute} for {group}; use MixedPrecisionPolicy(main_params_dtype=None)"
        )
    return True


def _check_state(given: dict[str, Any], views: dict[str, DTensor], parameter: torch.Tensor) -> None:
    unknown = [key for key in given if key not in views and key != STEP]
    if REMAINDER in unknown:
        raise ValueError(
            f"state of a parameter of shape {list(parameter.shape)} holds {REMAINDER}, the lower halves of its main weights, "
            "for which this optimizer has no place; build it with store_param_remainders=True, or load a checkpoint of "
            "the model and the optimizer with load_checkpoint, which joins them"
        )
    if unknown:
        raise ValueError(f"the state of AdamW is {[STEP, *views]}, got {unknown} besides; use torch.optim.AdamW")


def _fill(view: DTensor, value: Any, parameter: torch.Tensor) -> None:
    """Afterwards ``view`` equals ``value``: a DTensor of any placement, a whole tensor, or None for zeros."""
    if value is None:
        view._local_tensor.zero_()
        return
    if value is view:
        return
    if value.shape != parameter.shape:
        raise ValueError(f"state must have the parameter's shape {list(parameter.shape)}, got {list(value.shape)}")
    if isinstance(value, DTensor):
        if value.placements == view.placements and value.device_mesh == view.device_mesh:
            view._local_tensor.copy_(value._local_tensor)
            return
        value = value.full_tensor()
    view._local_tensor.copy_(local_rows(view, value))
