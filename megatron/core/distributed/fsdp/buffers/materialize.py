"""Fill modules that were built on the meta device, unit by unit, so that no rank holds more than one unit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from megatron.core.distributed.fsdp.buffers.retired_parameter import RetiredParameter


def materialize(
    root: nn.Module, modules: Sequence[tuple[str, nn.Module]], device: torch.device
) -> dict[nn.Parameter, nn.Parameter]:
    """Replace the meta tensors of ``modules`` by real ones, filled by ``reset_parameters``.

    Tied weights stay tied, and keep the values that the first module that holds them gave them. One that another unit
    has sharded already is left for that unit to share.

    Args:
        root: the unit's module; for messages.
        modules: (name, module) of the unit, in the order in which they are filled.
        device: where tensors are made.

    Returns:
        What each meta parameter has become.

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
    made: dict[nn.Parameter, nn.Parameter] = {}
    for _, module in modules:
        if not _is_meta(module):
            continue
        filled = _make_empty(module, made, device)
        module.reset_parameters()  # type: ignore[operator]
        module._parameters.update(filled)
    return made


def _make_empty(
    module: nn.Module, made: dict[nn.Parameter, nn.Parameter], device: torch.device
) -> dict[str, nn.Parameter]:
    """Give the module's meta tensors memory; return those of its parameters that another module has filled."""
    filled: dict[str, nn.Parameter] = {}
    for key, parameter in module._parameters.items():
        if parameter is None or not parameter.is_meta:
            continue
        values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        fresh = nn.Parameter(values, requires_grad=parameter.requires_grad)
        fresh.__dict__.update(parameter.__dict__)
        if isinstance(parameter, RetiredParameter):
            filled[key] = parameter
        elif parameter in made:
            filled[key] = made[parameter]
        else:
            made[parameter] = fresh
        module._parameters[key] = fresh
    for key, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[key] = torch.empty_like(buffer, device=device)
    return filled


def move_buffers(modules: Sequence[tuple[str, nn.Module]], device: torch.device) -> None:
    """Move the modules' buffers to ``device``."""
    for _, module in modules:
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[key] = buffer.to(device)


def _is_meta(module: nn.Module) -> bool:
    own = [*module._parameters.values(), *module._buffers.values()]
    return any(tensor is not None and tensor.is_meta and not isinstance(tensor, RetiredParameter) for tensor in own)
