"""Modules made on the meta device get their weights, unit by unit, so that no rank ever holds more than one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def materialize(root: nn.Module, modules: Sequence[tuple[str, nn.Module]], device: torch.device) -> None:
    """Afterwards no parameter or buffer of ``modules`` is on the meta device; ``reset_parameters`` has filled each.

    Args:
        root: the unit's module; for messages.
        modules: (name, module) of the unit, in the order in which they are filled.
        device: where tensors are made.

    Raises:
        ValueError: a module owns meta tensors and has no ``reset_parameters``; it is named.
    """
    lacking = [
        f"{name or type(root).__name__} ({type(module).__name__})"
        for name, module in modules
        if _is_meta(module) and not callable(getattr(module, "reset_parameters", None))
    ]
    if lacking:
        raise ValueError(
            f"modules on the meta device must have reset_parameters() to fill their tensors, got none in {', '.join(lacking)}; "
            "add the method, or build these modules on a real device"
        )
    made: dict[nn.Parameter, nn.Parameter] = {}  # tied weights stay tied
    for _, module in modules:
        if not _is_meta(module):
            continue
        before = {key: parameter for key, parameter in module._parameters.items() if parameter is not None}
        module.to_empty(device=device, recurse=False)
        for key, parameter in before.items():
            if not parameter.is_meta:
                continue
            fresh = module._parameters[key]
            assert fresh is not None
            if fresh is not parameter:
                fresh.__dict__.update(parameter.__dict__)
            module._parameters[key] = made.setdefault(parameter, fresh)
        module.reset_parameters()  # type: ignore[operator]


def move_buffers(modules: Sequence[tuple[str, nn.Module]], device: torch.device) -> None:
    """Afterwards the modules' buffers are on ``device``; a value of theirs never changes."""
    for _, module in modules:
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[key] = buffer.to(device)


def _is_meta(module: nn.Module) -> bool:
    own = [*module._parameters.values(), *module._buffers.values()]
    return any(tensor is not None and tensor.is_meta for tensor in own)
