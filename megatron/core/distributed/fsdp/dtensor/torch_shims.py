"""All that the engine changes of torch for the whole process: five shims. Each acts only for our placements.

| shim | why | delete it when |
|---|---|---|
| class of DTensors: ``DTensor.__new__``, torch's tables of classes | all ways to make a DTensor by an ``UnevenShard`` must make an ``UnevenDTensor``, which optimizers' ``foreach`` must serve | torch asks a placement for the class; its tables ask ``isinstance`` |
| whole shapes: ``DTensor.from_local``, ``distribute_tensor`` | torch takes the whole shape from one rank's rows, makes an even ``Shard(0)`` of an ``UnevenShard``, and sends int16, which no backend does | it asks the placement for shape and part |
| redistribution: its plans, checks of a spec | torch moves nothing between two shards of one dim, and demands ``Shard(dim)`` itself | it asks the placement whether they are equal |
| parts of a tensor: ``_compute_local_shape_and_global_offset``, ``_broadcast_tensors`` of full state dicts | torch takes a rank's part to be one box of the whole tensor, and sends int16 | placements can name several boxes |
| ``torch.autograd._engine_run_backward`` (``wrap_backward``) | the error of a backward that comes too late names no unit (checks/late_reads.py) | an error of autograd can be given a note by a hook |

``tests/core/distributed/fsdp/dtensor/test_torch_shims.py`` compares torch before and after the import with this list, and finds that
no other file of the engine assigns to torch. Calls of torch's own hooks (``add_safe_globals``, rules of dynamo) are not shims.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed._state_dict_utils as torch_state_dicts
import torch.distributed.tensor._api as torch_api
import torch.distributed.tensor._redistribute as torch_redistribute
import torch.distributed.tensor._utils as torch_utils
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement
from torch.optim.optimizer import _foreach_supported_types as _kinds_for_optimizers
from torch.utils._foreach_utils import _foreach_supported_types as _kinds_for_norms

from megatron.core.distributed.fsdp.config.torch_versions import NEEDS_DISPATCH_RULES
from megatron.core.distributed.fsdp.dtensor.placements import (
    UnevenShard,
    has_uneven,
    is_in_boxes,
    is_uneven,
    local_rows,
)
from megatron.core.distributed.fsdp.dtensor.propagation import plan_through_replicate
from megatron.core.distributed.fsdp.dtensor.uneven_dtensor import UnevenDTensor, placed_like

_Function = Callable[..., Any]


def install() -> None:
    """Install the shims of this file. Called once, by the package."""
    DTensor.__new__ = staticmethod(_choosing_class(DTensor.__new__))  # type: ignore[method-assign]
    _register_class(UnevenDTensor)
    DTensor.from_local = staticmethod(_wrapped(_from_local, DTensor.from_local))  # type: ignore[method-assign]
    _wrap_in_place(torch_api.distribute_tensor, _distribute)
    _replace(torch_redistribute, "_gen_transform_infos_non_cached", plan_through_replicate)
    _replace(DTensorSpec, "_verify_shard_order", _verify_shard_order)
    _replace(torch_utils, "_compute_local_shape_and_global_offset", _one_box)
    _replace(torch_state_dicts, "_broadcast_tensors", _broadcast_full_state)


def wrap_backward(wrapper: Callable[[_Function], _Function]) -> None:
    """Run each backward of the process by ``wrapper(torch's function)``."""
    torch.autograd._engine_run_backward = wrapper(torch.autograd._engine_run_backward)


def _wrapped(wrapper: _Function, former: _Function) -> _Function:
    """Return ``former`` with a call of ``wrapper``, which gets it and its arguments, in its place."""

    @functools.wraps(former)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(former, *args, **kwargs)

    return call


def _replace(owner: Any, name: str, wrapper: _Function) -> None:
    setattr(owner, name, _wrapped(wrapper, getattr(owner, name)))


def _wrap_in_place(function: Any, wrapper: _Function) -> None:
    """Let a function call ``wrapper`` with its former self and its arguments."""
    # Most files import torch before the engine, and hold the function itself: another one in its place would leave them torch's,
    # which makes even shards. So the function stays, and its code is replaced.
    former = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    former.__kwdefaults__ = function.__kwdefaults__
    function.__signature__ = inspect.signature(former)
    function.__globals__["_call_engine_of_fsdp"] = functools.partial(wrapper, former)
    function.__code__, function.__defaults__, function.__kwdefaults__ = _calls_engine.__code__, None, None


def _calls_engine(*args: Any, **kwargs: Any) -> Any:
    """Lend its code to a function of another module, whose name for the engine's function this is."""
    return _call_engine_of_fsdp(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821


# ---- the class of DTensors ------------------------------------------------------------------------------------------


def _choosing_class(new: _Function) -> _Function:
    """Return a ``DTensor.__new__`` that makes a tensor of our class where the spec has a placement of ours."""

    # Autograd and redistribution name DTensor itself. All DTensors of the process are made here, so it is short: 0.5 us each.
    # See [Note: class of DTensors].
    def make(cls: type[DTensor], local_tensor: Any, spec: Any, requires_grad: bool) -> Any:
        if cls is DTensor and has_uneven(spec.placements):
            cls = UnevenDTensor
        return new(cls, local_tensor, spec, requires_grad)

    return make


def _register_class(cls: type[torch.Tensor]) -> None:
    """Enter a subclass of DTensor in torch's tables: the kinds of tensors that optimizers' ``foreach`` serves, and dispatch."""
    for table in (_kinds_for_optimizers, _kinds_for_norms):
        table.append(cls)
    if not NEEDS_DISPATCH_RULES:
        return

    def rule(_: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return cls.__torch_dispatch__(func, types, args, kwargs)

    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith(("aten::", "c10d::", "prims::")):
            torch._library.simple_registry.singleton.find(name).torch_dispatch_rules.register(cls, rule)


# ---- whole shapes ---------------------------------------------------------------------------------------------------


def _from_local(
    make: _Function, local_tensor: Any, device_mesh: Any = None, placements: Any = None, **others: Any
) -> Any:
    """Refuse to take the whole tensor's shape from one rank's rows, which are as many on other ranks by chance only."""
    for axis, placement in enumerate(placements or ()):
        is_unknown = others.get("shape") is None and (device_mesh is None or device_mesh.size(axis) > 1)
        if isinstance(placement, UnevenShard) and is_unknown:
            raise ValueError(
                f"DTensor.from_local must be told the shape of a tensor placed by {placement}, of which ranks hold unequal "
                "parts; pass shape=p.shape, stride=p.stride() of the tensor p that it is to be like"
            )
    return make(local_tensor, device_mesh, placements, **others)


def _distribute(
    distribute: _Function, tensor: Any, device_mesh: Any = None, placements: Any = None, **others: Any
) -> Any:
    """Distribute a tensor as torch does, which makes an even ``Shard(0)`` of ours."""
    if isinstance(tensor, DTensor) or not placements or not (has_uneven(placements) or tensor.dtype == torch.int16):
        return distribute(tensor, device_mesh, placements, **others)
    # gloo knows no int16: what travels are bits.
    sent = tensor.detach().view(torch.float16) if tensor.dtype == torch.int16 else tensor.detach()
    whole = distribute(sent, device_mesh, [Replicate()] * len(placements), **others)
    bits, mesh = whole._local_tensor.view(tensor.dtype), whole.device_mesh
    whole = DTensor.from_local(bits, mesh, whole.placements, run_check=False)
    return whole.redistribute(placements=placements).requires_grad_(tensor.requires_grad)


# ---- redistribution -------------------------------------------------------------------------------------------------


def _verify_shard_order(verify: _Function, spec: DTensorSpec, shard_order: Any) -> None:
    """Check as torch does, where no RowShard is: that is a shard of its dim, but does not equal the ``Shard(dim)`` that torch demands."""
    if not has_uneven(spec.placements):
        verify(spec, shard_order)


# ---- parts of a tensor ----------------------------------------------------------------------------------------------


def _one_box(
    one_box: _Function, shape: Any, mesh_shape: Any, coordinate: Any, placements: Sequence[Placement], *others: Any
) -> Any:
    # See [Note: what rows cost]. On all ranks, also on those without rows: a rank that went on would wait for the others in the next collective.
    if is_in_boxes(placements):
        raise NotImplementedError(
            f"a rank's part must be one box of the whole tensor, got one placed by {tuple(placements)}; give whole tensors to "
            "load_state_dict, call full_tensor(), or take boxes_of() from megatron.core.distributed.fsdp.dtensor.placements"
        )
    return one_box(shape, mesh_shape, coordinate, placements, *others)


@torch.no_grad()
def _broadcast_full_state(
    broadcast: _Function, full: dict[str, Any], local: dict[str, Any], keys: Sequence[str], *others: Any, **named: Any
) -> None:
    """Broadcast tensors of the first rank for ``set_model_state_dict`` and others (``broadcast_from_rank0=True``).

    Ranks: all; ``full`` holds sizes and dtypes on the others.
    """
    # torch broadcasts int16 tensors (the remainders of bf16 weights) as they are, which is an error on all backends. Here what
    # travels are bits.
    narrow = {key: full[key] for key in keys if full[key].dtype == torch.int16}
    as_bits = {
        key: value.view(torch.float16) if isinstance(value, torch.Tensor) else value._replace(dtype=torch.float16)
        for key, value in narrow.items()
    }
    states = ((key, local.get(key)) for key in keys)
    ours = {k: state for k, state in states if isinstance(state, DTensor) and (is_uneven(state) or k in narrow)}
    # Of a DTensor torch keeps the one box that it takes for this rank's part; for any other tensor it leaves the whole one.
    local.update(dict.fromkeys(ours, torch.empty(0)))
    broadcast({**full, **as_bits}, local, keys, *others, **named)
    local.update((key, local[key].view(torch.int16)) for key in narrow if local.get(key) is not None)
    for key, state in ours.items():
        rows = local_rows(state, local[key])
        local[key] = placed_like(state, rows) if state.is_meta else state
        if not state.is_meta:
            state._local_tensor.copy_(rows)
