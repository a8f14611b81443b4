"""PyTorch's methods of modules on sharded parameters: ``.to()``, ``to_empty``, ``state_dict``, ``load_state_dict``.

PyTorch's ``_apply`` would put other tensors in the place of the DTensors, which are views of the engine's buffers, and an optimizer
would train what no forward reads. So parameters are taken out while a module's own ``_apply`` converts the rest, and the
function's results are written into them. After ``to_empty`` they hold no values: the next forward checks that they were filled.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp.api.module import FsdpModule
from megatron.core.distributed.fsdp.buffers.materialize import mark_unfilled
from megatron.core.distributed.fsdp.buffers.param_slots import RetiredParameter
from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup, group_of
from megatron.core.distributed.fsdp.dtensor.placements import local_rows, memory_of
from megatron.core.distributed.fsdp.dtensor.uneven_dtensor import placed_like
from megatron.core.distributed.fsdp.runtime.unit import FsdpUnit

Function = Callable[[torch.Tensor], torch.Tensor]


def adapt_modules(unit: FsdpUnit, modules: Sequence[tuple[str, nn.Module]]) -> None:
    """Make PyTorch's methods of a unit's modules serve sharded parameters.

    Args:
        modules: (name in the unit, module).
    """
    for name, module in modules:
        # Modules without tensors keep torch's _apply, which calls that of their children.
        if module._parameters or module._buffers or isinstance(module, FsdpModule):
            module.__dict__["_apply"] = _Apply(unit, name, module)
        if isinstance(module, nn.RNNBase):
            # cuDNN's would move the weights into separate memory, away from the buffers that are gathered.
            module.__dict__["flatten_parameters"] = lambda: None
        if isinstance(module, nn.TransformerEncoderLayer) and any(isinstance(m, FsdpModule) for m in module.modules()):
            # Torch asks this before it takes a kernel that reads the parts' weights without calling them, so that no part is unsharded.
            module.activation_relu_or_gelu = 0
    _watch_loads(unit, modules)


@torch.no_grad()
def _new_dtypes(modules: Iterable[nn.Module], fn: Function) -> dict[FsdpParameterGroup, torch.dtype]:
    """Return the groups whose parameters all get one other dtype from ``fn``, which they can take before their first forward.

    Raises:
        RuntimeError: ``fn`` would change the dtype or device of a sharded parameter otherwise; nothing has changed.
    """
    found: dict[FsdpParameterGroup, dict[int, torch.dtype]] = {}
    refusals: dict[FsdpParameterGroup, str] = {}
    for module in modules:
        for key, parameter in module._parameters.items():
            group = None if parameter is None else group_of(parameter)
            if parameter is None or group is None:
                continue
            own = memory_of(parameter._local_tensor, writes=False) if isinstance(parameter, DTensor) else parameter
            # One element shows what ``fn`` does, at no cost in memory. A clone: ``fn`` may write in place.
            converted = fn(own.detach().flatten()[:1].clone())
            if converted.dtype == own.dtype and converted.device == own.device:
                continue
            refusal = refusals.setdefault(group, _refusal(f"{key} of {type(module).__name__}", own, converted))
            if converted.device != own.device or not isinstance(parameter, DTensor):
                raise RuntimeError(refusal)
            found.setdefault(group, {})[id(parameter)] = converted.dtype
    for group, dtypes in found.items():
        is_whole = dtypes.keys() == {id(parameter) for parameter in group.sharded} and len({*dtypes.values()}) == 1
        if not (is_whole and group.can_become(next(iter(dtypes.values())))):
            raise RuntimeError(refusals[group])
    return {group: next(iter(dtypes.values())) for group, dtypes in found.items()}


def _refusal(name: str, own: torch.Tensor, converted: torch.Tensor) -> str:
    text = (
        f"the dtype and device of sharded parameters must stay {own.dtype} on {own.device}, got {converted.dtype} on "
        f"{converted.device} for {name} from .to(), .half(), .cuda() or the like; convert the module before fully_shard "
        "(with a policy of FSDP2, or main_params_dtype=None, a whole unit's dtype may change before its first forward)"
    )
    if converted.device != own.device and converted.device.type == "cpu":
        text += (
            ". To free a GPU's memory between phases, move the largest part, the optimizer's state (state[key] = value.to('cpu')), or "
            "let FlatAdamW(..., offload_fraction=1.0) keep it and fp32 weights in the host's memory"
        )
    return text


@torch.no_grad()
def _write(parameter: DTensor, fn: Function) -> None:
    local = memory_of(parameter._local_tensor).detach()
    values = fn(local)
    if values is not local:
        local.copy_(values)
    group = group_of(parameter)
    context = None if group is None or group.context is None else group.context()
    if context is not None:
        context.weights_changed()  # gathered weights are out of date


class _Apply:
    """``_apply`` of one module of a unit; a copy of the module gets a separate one."""

    # Weak: the module's own __dict__ holds this, and a cycle would keep a deleted model until the garbage collector runs.
    def __init__(self, unit: FsdpUnit, name: str, module: nn.Module) -> None:
        self._unit, self._name, self._module = weakref.ref(unit), name, weakref.ref(module)

    def __call__(self, fn: Function, recurse: bool = True) -> nn.Module:
        """Apply ``fn`` to the buffers of the tree and to sharded values, as ``.to()`` and the like do; DTensors stay.

        Units whose parameters ``fn`` all gives one other dtype get it, before their first forward.

        Raises:
            RuntimeError: ``fn`` would change the dtype or device of a parameter in the module's tree otherwise; nothing has changed.
        """
        module, unit = self._module(), self._unit()
        assert module is not None, "called through the module"
        fn = _Empty(fn) if _is_to_empty(fn) else fn
        # First, for the whole tree: a refusal must leave all of it as it was.
        for group, dtype in _new_dtypes(module.modules() if recurse else (module,), fn).items():
            group.convert(dtype)
        own = {key: p for key, p in module._parameters.items() if p is not None and group_of(p) is not None}
        for key, parameter in own.items():
            if isinstance(parameter, DTensor):
                _write(parameter, fn)
            module._parameters[key] = None  # torch's _apply would put another tensor in the DTensor's place
        try:
            type(module)._apply(module, fn, recurse)
        finally:
            module._parameters.update(own)
            if isinstance(module, nn.RNNBase):
                module._init_flat_weights()  # its list of weights, which it made while there were none
        if isinstance(fn, _Empty) and unit is not None:
            prefix = f"{self._name}." if self._name else ""
            unit.wait_for_values(
                (prefix + key, held, key)
                for held in (module._parameters, module._buffers)
                for key, tensor in held.items()
                if tensor is not None and not isinstance(tensor, RetiredParameter)
            )
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> _Apply:
        module, unit = self._module(), self._unit()
        assert module is not None and unit is not None, "copied with the module"
        return _Apply(unit, self._name, memo.get(id(module), module))


class _Empty:
    """The function of ``to_empty``, whose tensors are marked as unfilled."""

    def __init__(self, fn: Function) -> None:
        self._fn = fn

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return mark_unfilled(self._fn(tensor))


# By name: torch passes a lambda, the only sign that values are to be dropped.
def _is_to_empty(fn: Function) -> bool:
    return getattr(fn, "__qualname__", "").startswith(f"{nn.Module.to_empty.__qualname__}.")


def _watch_loads(unit: FsdpUnit, modules: Sequence[tuple[str, nn.Module]]) -> None:
    """Make ``load_state_dict`` of these modules copy full or sharded tensors into the unit's main weights.

    So with ``assign=True`` too. ``load_state_dict`` itself refuses missing and extra keys and values of another shape,
    by name. Weights that were gathered before are gathered again, so that the next forward sees what was loaded.

    What ``state_dict`` returns can be passed to torch.save and deepcopy: see ``placed_like``.

    Raises (from ``load_state_dict``):
        RuntimeError: the unit is running.
    """
    unit_ref = weakref.ref(unit)  # modules may outlive their unit, and hooks are held by modules

    def before_load(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        unit = unit_ref()
        if unit is None:
            return
        unit.show_sharded()
        if any(group.weights.holders.forwards for group in unit.groups):
            raise RuntimeError(
                f"load_state_dict must find sharded parameters, got those of {unit.name} within its forward, where loaded values "
                "would be lost; load before forward, or after it"
            )
        context = unit.context
        if context is not None:
            context.finish_updates()  # a pending update would write main weights after the load
        loads = False
        for key, parameter in module._parameters.items():
            value = state_dict.get(prefix + key)
            if isinstance(parameter, DTensor) and isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                copy_into(parameter, value)
                loads = True
                state_dict[prefix + key] = parameter  # torch copies it into itself, also with assign=True
        if loads:
            for group in unit.groups:
                group.weights.note_load()
        if context is not None:
            if loads:
                context.note_load(unit.own_groups[0])
            context.weights_changed()

    def before_save(*_: Any) -> None:
        unit = unit_ref()
        if unit is not None and unit.context is not None:
            unit.show_sharded()
            unit.context.finish_updates()

    def after_save(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        for key in module._parameters:
            value = state_dict.get(prefix + key)
            if isinstance(value, DTensor) and not isinstance(value, nn.Parameter):  # with keep_vars it is one
                state_dict[prefix + key] = placed_like(value, memory_of(value._local_tensor))

    for _, module in modules:
        if any(parameter is not None for parameter in module._parameters.values()):
            module.register_load_state_dict_pre_hook(before_load)
            module.register_state_dict_pre_hook(before_save)
            module.register_state_dict_post_hook(after_save)


@torch.no_grad()
def copy_into(sharded: DTensor, value: torch.Tensor) -> None:
    """Copy a full tensor, or a DTensor of any placement, into ``sharded``. Ranks: all, for a DTensor."""
    if isinstance(value, DTensor):
        if value.placements == sharded.placements and value.device_mesh == sharded.device_mesh:
            memory_of(sharded._local_tensor).copy_(memory_of(value._local_tensor, writes=False))
            return
        value = value.full_tensor()
    memory_of(sharded._local_tensor).copy_(local_rows(sharded, value))
