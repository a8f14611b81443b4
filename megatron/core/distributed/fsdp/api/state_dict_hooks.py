"""``state_dict`` and ``load_state_dict`` of sharded modules, which read and write the main weights."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp.codec.hooked_tensor import memory_of
from megatron.core.distributed.fsdp.dtensor.placements import local_rows
from megatron.core.distributed.fsdp.dtensor.uneven_dtensor import placed_like
from megatron.core.distributed.fsdp.runtime.unit import FsdpUnit


def watch_loads(unit: FsdpUnit, modules: Sequence[tuple[str, nn.Module]]) -> None:
    """Make ``load_state_dict`` of these modules copy full or sharded tensors into the unit's main weights.

    So with ``assign=True`` too. ``load_state_dict`` itself refuses missing and extra keys and values of another shape,
    by name. Weights that were gathered before are gathered again, so that the next forward sees what was loaded.

    What ``state_dict`` returns can be passed to torch.save and deepcopy: see ``placed_like``.

    Raises (from ``load_state_dict``):
        RuntimeError: the unit is running.
    """
    unit_ref = weakref.ref(unit)

    def before_load(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        unit = unit_ref()
        if unit is None:
            return
        unit.show_sharded()
        if any(group.weights.num_forwards for group in unit.groups):
            raise RuntimeError(
                f"load_state_dict must find sharded parameters, got those of {unit.name} within its forward, where loaded values "
                "would be lost; load before forward, or after it"
            )
        if unit.context is not None:
            unit.context.finish_updates()
        loads = False
        for key, parameter in module._parameters.items():
            value = state_dict.get(prefix + key)
            if isinstance(parameter, DTensor) and isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                copy_into(parameter, value)
                loads = True
                state_dict[prefix + key] = parameter
        for group in unit.groups if loads else ():
            group.weights.note_load()
        if unit.context is not None and loads:
            unit.context.note_load(unit.own_groups[0])
        if unit.context is not None:
            unit.context.weights_changed()

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
