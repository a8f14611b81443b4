"""All that the engine changes of torch for the whole process. Each shim acts for our placements or meshes alone.

| shim | why | delete it when |
|---|---|---|
| ``DTensor.__new__`` | all ways to make a DTensor by an ``UnevenShard`` must make an ``UnevenDTensor``, whose operations know it | torch asks a placement for the class |
| ``DTensor.from_local`` | torch takes the whole shape from one rank's rows | it asks the placement for the shape |
| ``distribute_tensor`` | torch makes an even ``Shard(0)`` of an ``UnevenShard``, and sends int16, which no backend does | it asks the placement for the part |
| plans of redistribution, checks of a spec | torch moves nothing between two shards of one dim, and demands ``Shard(dim)`` itself | it asks the placement whether they are equal |
| parts of a tensor | torch takes a rank's part to be one box of the whole tensor, and full state dicts rely on it | placements can name several boxes |
| ``let_axes_have_any_order`` (config/torch_versions.py) | torch 2.13 raises KeyError for a reduction over axes whose order differs from the mesh's | the lookup returns no flattened axis |

``tests/core/distributed/fsdp/dtensor/test_torch_shims.py`` compares torch before and after the import with this list.
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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement

from megatron.core.distributed.fsdp.config.torch_versions import let_axes_have_any_order, register_class_of_dtensors
from megatron.core.distributed.fsdp.dtensor.local_parts import placed_like
from megatron.core.distributed.fsdp.dtensor.random_fill import local_rows
from megatron.core.distributed.fsdp.dtensor.row_shard_rules import (
    check_shape_follows,
    is_uneven,
    plan_through_replicate,
)
from megatron.core.distributed.fsdp.dtensor.tensor_pieces import is_in_boxes
from megatron.core.distributed.fsdp.dtensor.uneven_dtensor import UnevenDTensor
from megatron.core.distributed.fsdp.dtensor.uneven_shard import UnevenShard, has_uneven

_Function = Callable[..., Any]


def install() -> None:
    """Install the shims of this file, and tell torch's tables of classes of ours. Called once, by the package."""
    register_class_of_dtensors(UnevenDTensor)
    DTensor.__new__ = staticmethod(_choosing_class(DTensor.__new__))  # type: ignore[method-assign]
    DTensor.from_local = staticmethod(_wrapped(_from_local, DTensor.from_local))  # type: ignore[method-assign]
    _wrap_in_place(torch_api.distribute_tensor, _distribute)
    _replace(torch_redistribute, "_gen_transform_infos_non_cached", _plan)
    _replace(DTensorSpec, "_verify_shard_order", _verify_shard_order)
    _replace(torch_utils, "_compute_local_shape_and_global_offset", _one_box)
    _replace(torch_state_dicts, "_broadcast_tensors", _broadcast_full_state)
    _replace(torch_state_dicts, "_distribute_tensors", _distribute_full_state)
    let_axes_have_any_order()


def _wrapped(wrapper: _Function, former: _Function) -> _Function:
    """Return ``former`` with a call of ``wrapper``, which gets it and its arguments, in its place."""

    @functools.wraps(former)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(former, *args, **kwargs)

    return call


def _replace(owner: Any, name: str, wrapper: _Function) -> None:
    setattr(owner, name, _wrapped(wrapper, getattr(owner, name)))


def _wrap_in_place(function: Any, wrapper: _Function) -> None:
    """Let a function call ``wrapper`` with its former self and its arguments, also for those who have imported it before."""
    former = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    former.__kwdefaults__ = function.__kwdefaults__
    function.__signature__ = inspect.signature(former)
    function.__globals__["_call_engine_of_fsdp"] = functools.partial(wrapper, former)
    function.__code__, function.__defaults__, function.__kwdefaults__ = _calls_engine.__code__, None, None


def _calls_engine(*args: Any, **kwargs: Any) -> Any:
    """Lend its code to a function of another module, whose name for the engine's function this is."""
    return _call_engine_of_fsdp(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821


# ---- making DTensors ------------------------------------------------------------------------------------------------


def _choosing_class(new: _Function) -> _Function:
    """Return a ``DTensor.__new__`` that makes a tensor of our class where the spec has a placement of ours.

    Autograd and redistribution name DTensor itself. All DTensors of the process are made here, so it is short: 0.5 us each.
    """

    def make(cls: type[DTensor], local_tensor: Any, spec: Any, requires_grad: bool) -> Any:
        if cls is DTensor and has_uneven(spec.placements):
            cls = UnevenDTensor
        return new(cls, local_tensor, spec, requires_grad)

    return make


def _from_local(
    from_local: _Function,
    local_tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    **others: Any,
) -> Any:
    if others.get("shape") is None and placements is not None:
        check_shape_follows(device_mesh, placements)
    return from_local(local_tensor, device_mesh, placements, **others)


def _distribute(
    distribute: Callable[..., DTensor],
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Distribute a tensor as torch does, which makes an even ``Shard(0)`` of ours."""
    is_own = has_uneven(placements or ())
    if isinstance(tensor, DTensor) or placements is None or not (is_own or tensor.dtype == torch.int16):
        return distribute(tensor, device_mesh, placements, src_data_rank=src_data_rank)
    # gloo knows no int16: what travels are bits.
    sent = tensor.detach().view(torch.float16) if tensor.dtype == torch.int16 else tensor.detach()
    whole = distribute(sent, device_mesh, [Replicate()] * len(placements), src_data_rank=src_data_rank)
    placed = whole.redistribute(placements=placements)
    if placed.dtype != tensor.dtype:
        bits = placed._local_tensor.view(tensor.dtype)
        mesh, shape, stride = placed.device_mesh, tensor.shape, tensor.stride()
        placed = DTensor.from_local(bits, mesh, placements, run_check=False, shape=shape, stride=stride)
    return placed.requires_grad_(tensor.requires_grad)  # type: ignore[return-value]


# ---- redistribution -------------------------------------------------------------------------------------------------


def _plan(plan: _Function, src_spec: DTensorSpec, dst_spec: DTensorSpec, *args: Any) -> Any:
    if not (has_uneven(src_spec.placements) or has_uneven(dst_spec.placements)):
        return plan(src_spec, dst_spec, *args)
    return plan_through_replicate(plan, src_spec, dst_spec, *args)


def _verify_shard_order(verify: _Function, spec: DTensorSpec, shard_order: Any) -> None:
    """Check as torch does that each axis named for a dim holds ``Shard(dim)``, which RowShard is but does not equal."""
    if has_uneven(spec.placements):
        placements = tuple(Shard(p.dim) if isinstance(p, UnevenShard) else p for p in spec.placements)
        verify(types.SimpleNamespace(placements=placements), shard_order)
    else:
        verify(spec, shard_order)


# ---- parts of a tensor ----------------------------------------------------------------------------------------------


def _one_box(
    one_box: _Function,
    global_shape: Any,
    mesh_shape: Any,
    my_coordinate: Any,
    placements: Sequence[Placement],
    *args: Any,
    **kwargs: Any,
) -> Any:
    if is_in_boxes(placements):
        raise NotImplementedError(
            f"a rank's part must be one box of the whole tensor, got one placed by {tuple(placements)}; give whole tensors to "
            "load_state_dict, call full_tensor(), or take boxes_of() from megatron.core.distributed.fsdp.dtensor.tensor_pieces"
        )
    return one_box(global_shape, mesh_shape, my_coordinate, placements, *args, **kwargs)


def _broadcast_full_state(
    broadcast: _Function, full: dict[str, Any], local: dict[str, Any], keys: Sequence[str], *others: Any, **named: Any
) -> None:
    """Broadcast tensors of the first rank for ``set_model_state_dict`` and others (``broadcast_from_rank0=True``).

    torch broadcasts int16 tensors (the remainders of bf16 weights) as they are, which is an error on all backends. Here what travels
    are bits.

    Ranks: all; ``full`` holds sizes and dtypes on the others.
    """
    narrow = {key: full[key] for key in keys if full[key].dtype == torch.int16}
    as_bits = {
        key: value.view(torch.float16) if isinstance(value, torch.Tensor) else value._replace(dtype=torch.float16)
        for key, value in narrow.items()
    }
    broadcast({**full, **as_bits}, local, keys, *others, **named)
    for key in narrow:
        value = local.get(key)
        if isinstance(value, torch.Tensor) and value.dtype == torch.float16:
            local[key] = value.view(torch.int16)


@torch.no_grad()
def _distribute_full_state(
    distribute: _Function, local: dict[str, Any], keys: Sequence[str], *others: Any, **named: Any
) -> None:
    """Keep this rank's part of each whole tensor; ``local`` holds (DTensor to fill, whole tensor), and gets the DTensor."""
    for key in keys:
        if not isinstance(local.get(key), tuple):
            continue
        state, whole = local[key]
        if is_uneven(state) or state.dtype == torch.int16:
            rows = local_rows(state, whole.view(torch.int16) if state.dtype == torch.int16 else whole)
            if state.is_meta:
                state = placed_like(state, rows.clone())
            else:
                state._local_tensor.copy_(rows)
            local[key] = state
    distribute(local, keys, *others, **named)
