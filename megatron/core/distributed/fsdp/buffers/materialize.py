"""Fill modules that were built on the meta device, unit by unit, so that no rank holds more than one unit."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp.buffers.param_slots import RetiredParameter
from megatron.core.distributed.fsdp.buffers.weight_codec import keeping_initial_values, plain_of
from megatron.core.distributed.fsdp.dtensor.placements import leaves_of
from megatron.core.distributed.fsdp.dtensor.uneven_dtensor import UnevenDTensor

logger = logging.getLogger(__name__)

InitFn = Callable[[nn.Module], object]
# A tensor without values: its name in the unit, the dict of its module that holds it (which does not point back), the key.
Unfilled = tuple[str, dict[str, Any], str]
_REMEDY = (
    "pass init_fn to fully_shard (for a Hugging Face model its _init_weights; `init_fn=lambda module: None` if all values are "
    "loaded afterwards), or build the modules on a real device"
)


@dataclass
class Materialized:
    """What was made of the meta tensors of a unit.

    Args:
        made: what each meta parameter has become.
        unfilled: tensors that hold no values yet.
        by_reset: their values are those of ``reset_parameters``.
        starts: how often each of the parameters was written before they got values; not of those where that is not known.
    """

    made: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    unfilled: list[Unfilled] = field(default_factory=list)
    by_reset: bool = False
    starts: dict[nn.Parameter, int] = field(default_factory=dict)


def materialize(
    root: nn.Module,
    modules: Sequence[tuple[str, nn.Module]],
    device: torch.device,
    *,
    init_fn: InitFn | None = None,
    holds_reset: bool = False,
) -> Materialized:
    """Replace the meta tensors of ``modules`` by real ones, with the initial values that the model would have on a real device.

    Modules are filled by ``init_fn``, else by their ``reset_parameters`` (or ``_reset_parameters``), children first, as
    constructors do. Modules without such a method are left for who loads or initialises sharded parameters. Tensors are
    marked before (with NaN), so that one that nobody fills is found. Tied weights stay tied, and
    keep the values that the first module that holds them gave them. One that another unit has sharded already is left for
    that unit to share.

    Args:
        root: the unit's module; for messages.
        modules: (name, module) of the unit, parents first.
        device: where tensors are made.
        holds_reset: units inside of this one were filled by ``reset_parameters``.

    Raises:
        ValueError: initial values would not be those of ``reset_parameters``; a module has no such method, and a tensor of a
            dtype that cannot be marked; they are named.
    """
    metas = [(name, module) for name, module in modules if _is_meta(module)]
    label = {module: f"{name or type(root).__name__} ({type(module).__name__})" for name, module in modules}
    found = Materialized(by_reset=bool(metas) and init_fn is None)
    if init_fn is None and (metas or holds_reset):
        _check_initialisation(modules, metas, label)
    if not metas and (init_fn is not None or not holds_reset):
        return found
    # A list: ``init_fn`` and ``reset_parameters`` may replace modules while it is walked.
    for module in list(_children_first(root, {module for _, module in modules})):
        is_meta = _is_meta(module)
        # Tied weights keep the values that the first module gave them: what this one writes to its own parameter is dropped.
        filled = _make_empty(module, found, device) if is_meta else {}
        given = dict(module._parameters) if is_meta else {}
        if init_fn is not None:
            with torch.no_grad():
                init_fn(module)
        elif is_meta or _is_composite(module):
            _reset(module)  # a composite module also fills units inside
        _follow_replaced(module, given, found)
        module._parameters.update(filled)
    for name, module in metas:
        unfilled = [
            (f"{name}.{key}" if name else key, held, key)
            for held in (module._parameters, module._buffers)
            for key, tensor in held.items()
            if tensor is not None and not isinstance(tensor, RetiredParameter) and is_unfilled(tensor)
        ]
        found.unfilled.extend(unfilled)
    if init_fn is None:
        _compare_writes(metas, found, label)
    return found


def move_buffers(modules: Sequence[tuple[str, nn.Module]], device: torch.device) -> None:
    """Move the modules' buffers to ``device``."""
    for _, module in modules:
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[key] = buffer.to(device)


def _reset_of(module: nn.Module) -> Callable[[], object] | None:
    for name in ("reset_parameters", "_reset_parameters"):
        method = getattr(module, name, None)
        if callable(method):
            return method
    return None


def _is_composite(module: nn.Module) -> bool:
    """Return whether the module fills its children's parameters too, as those of torch do that hide their method."""
    return not callable(getattr(module, "reset_parameters", None)) and _reset_of(module) is not None


def _reset(module: nn.Module) -> None:
    reset = _reset_of(module)
    if reset is not None:
        with torch.no_grad(), keeping_initial_values(module):
            reset()


def _children_first(module: nn.Module, left: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules of the unit that are ``left`` in the order in which constructors finish; the set ends empty."""
    left.discard(module)
    for child in module.children():
        if child in left:
            yield from _children_first(child, left)
    yield module


def _check_initialisation(
    modules: Sequence[tuple[str, nn.Module]], metas: Sequence[tuple[str, nn.Module]], label: dict[nn.Module, str]
) -> None:
    """Refuse modules whose values ``reset_parameters`` would not make, or that could lack some without a mark."""
    own = [label[module] for _, module in modules if callable(getattr(module, "_init_weights", None))]
    if own:
        raise ValueError(
            f"a model on the meta device must get its initial values from reset_parameters(), got {', '.join(own)} with an "
            f"_init_weights of its own, whose values would be lost; {_REMEDY}"
        )
    if any(_is_composite(module) for _, module in modules):
        return
    names = [
        f"{label[module]}, whose {key} has no mark of one that is not filled ({tensor.dtype})"
        for _, module in metas
        if _reset_of(module) is None
        for key, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None and tensor.is_meta and mark_of(tensor.dtype) is None
    ]
    if names:
        raise ValueError(
            f"modules on the meta device must have reset_parameters() to fill their tensors, got none in {', '.join(names)}; "
            f"add the method, {_REMEDY}"
        )


def _compare_writes(metas: Sequence[tuple[str, nn.Module]], found: Materialized, label: dict[nn.Module, str]) -> None:
    """Compare how often constructors wrote to each parameter, which torch counts on the meta device too, with ``reset_parameters``.

    Raises:
        ValueError: constructors wrote more often: a module around it has initialised it again.

    Where they wrote less, a warning says so once, unless the module has ``resets_to_the_same_values``.
    """
    # The first module that holds a parameter is the one whose ``reset_parameters`` its values come from.
    holders = {id(p): module for _, module in reversed(metas) for p in module._parameters.values()}
    for _, held, key in found.unfilled:
        holders.pop(id(held[key]), None)
    again, never = dict[str, None](), dict[str, None]()
    for meta, start in found.starts.items():
        fresh = found.made[meta]
        holder = holders.get(id(fresh))
        by_constructor, by_reset = max(leaf._version for leaf in leaves_of(meta)), fresh._version - start
        # Versions count writes, not values: equal counts prove nothing, but a difference shows that one of them did something else.
        if holder is not None and by_constructor != by_reset:
            if by_constructor > by_reset:
                again[label[holder]] = None
            elif not getattr(holder, "resets_to_the_same_values", False):
                never[label[holder]] = None
    if again:
        raise ValueError(
            f"modules on the meta device must get their initial values from reset_parameters(), got {', '.join(again)}, whose "
            f"parameters a module around them initialised again; these values would be lost: {_REMEDY}"
        )
    if never:
        _warn_once(
            f"{', '.join(never)} got new initial values from reset_parameters(), which did not make those that they had before they "
            "were on the meta device (copies of a module, for example, begin with equal values); set "
            f"resets_to_the_same_values = True in a class whose reset_parameters() gives the same values each time, {_REMEDY}, if "
            "these matter"
        )


@functools.cache
def _warn_once(text: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning(text)


def _make_empty(module: nn.Module, found: Materialized, device: torch.device) -> dict[str, nn.Parameter]:
    """Give the module's meta tensors memory; return those of its parameters that another module has filled."""
    filled: dict[str, nn.Parameter] = {}
    for key, parameter in module._parameters.items():
        if parameter is None or not parameter.is_meta:
            continue
        plain = plain_of(parameter, key, module)
        fresh = nn.Parameter(_unfilled(plain, device), requires_grad=plain.requires_grad)
        # Attributes that constructors have set (``sequence_parallel``, codecs) say how the parameter is sharded.
        fresh.__dict__.update(plain.__dict__)
        if isinstance(parameter, RetiredParameter):
            filled[key] = parameter
        elif parameter in found.made:
            filled[key] = found.made[parameter]
        else:
            found.made[parameter] = fresh
            if not isinstance(fresh, DTensor):  # what its constructor wrote was written to another tensor
                found.starts[parameter] = fresh._version
        module._parameters[key] = fresh
    for key, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[key] = _unfilled(buffer, device)
    return filled


def _follow_replaced(module: nn.Module, given: Mapping[str, nn.Parameter | None], found: Materialized) -> None:
    """Take over parameters that the module's ``reset_parameters`` has made in place of those that it was given.

    Layers of transformer-engine do; attributes of the former, and whether it is trained, would be lost. How often they were
    written is not known.
    """
    meta_of = {id(fresh): meta for meta, fresh in found.made.items()}
    for key, former in given.items():
        parameter = module._parameters.get(key)
        if parameter is None or former is None or parameter is former:
            continue
        # The constructor of a replaced parameter knows nothing of what its user has frozen.
        parameter.requires_grad_(former.requires_grad)
        vars(parameter).update(vars(former))
        if id(former) in meta_of:
            meta = meta_of[id(former)]
            found.made[meta] = parameter
            found.starts.pop(meta, None)


def _unfilled(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        local = _unfilled(tensor._local_tensor, device)
        # Of our class, whose random fills are those of the whole tensor.
        return UnevenDTensor.over(
            local, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride()
        )
    # Memory from the allocator may hold the values of another model, which would look as if they were filled.
    return mark_unfilled(torch.empty(tensor.shape, dtype=tensor.dtype, device=device))


def _is_meta(module: nn.Module) -> bool:
    own = [*module._parameters.values(), *module._buffers.values()]
    return any(tensor is not None and tensor.is_meta and not isinstance(tensor, RetiredParameter) for tensor in own)


@torch.no_grad()
def mark_unfilled(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor that holds no values with NaN, or with the smallest number of int32 and int64; return it."""
    mark = mark_of(tensor.dtype)
    return tensor if mark is None else tensor.fill_(mark)


@torch.no_grad()
def is_unfilled(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on the meta device, or still holds what it was marked with."""
    # Each rank looks at its own part; the callers let ranks agree.
    tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    mark = mark_of(tensor.dtype)
    if tensor.is_meta or mark is None or tensor.numel() == 0:
        return tensor.is_meta
    if isinstance(mark, int):
        return bool((tensor == mark).all())
    # Of a large tensor that nobody has written the first element tells all. Tensors of other kinds may not let it be read.
    first = tensor[(0,) * tensor.dim()] if type(tensor) in (torch.Tensor, torch.nn.Parameter) else tensor
    return bool(first.isnan().any()) or bool(tensor.isnan().any())


def mark_of(dtype: torch.dtype) -> float | int | None:
    """Return what marks tensors of a dtype; None if nothing can."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return torch.iinfo(dtype).min if dtype in (torch.int32, torch.int64) else None
