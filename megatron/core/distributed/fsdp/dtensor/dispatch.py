"""How an operation runs on ``UnevenDTensor``: on the local tensors where placements allow that, else as torch's dispatcher would.

Torch's dispatcher runs for ours too, as a copy of the object whose propagation knows uneven rows (propagation.py). Torch's own
object, and thereby all other DTensors, are as they were.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OutputSharding
from torch.utils._python_dispatch import return_and_correct_aliasing

from megatron.core.distributed.fsdp.codec.hooked_tensor import memory_of
from megatron.core.distributed.fsdp.dtensor.placements import is_uneven, local_rows, write_part
from megatron.core.distributed.fsdp.dtensor.propagation import (
    LIST_PREFIXES,
    LIST_REDUCTIONS,
    NORMS,
    REMEDY,
    USE_IN_FORWARD,
    propagator_of_uneven_rows,
)

_aten = torch.ops.aten
_Op = Any  # torch._ops.OpOverload, which mypy takes for a function

# Operations of layers, which get a sharded weight next to a plain tensor outside of the unit's forward. Torch's error for mixed
# tensors does not name the cause.
_LAYERS = {
    _aten.embedding.default,
    _aten.native_layer_norm.default,
    _aten._fused_rms_norm.default,
    _aten.mul.Tensor,  # norms that are written by hand, and the operations after them
    _aten.add.Tensor,
    _aten.sub.Tensor,
    _aten.div.Tensor,
    _aten.addcmul.default,
    _aten.where.self,
    _aten.mm.default,  # losses that multiply by the head's weight
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.index.Tensor,
    _aten.index_select.default,
    _aten.native_group_norm.default,
    _aten.convolution.default,
    _aten.mkldnn_rnn_layer.default,
    _aten._cudnn_rnn.default,
}
# DistributedDataParallel joins all parameters in one tensor, and broadcasts that.
_REPLICAS = {_aten.cat.default, torch.ops.c10d.broadcast_.default}
# Handlers of torch that are right for uneven rows: they read metadata, or run the operation on local tensors.
_RIGHT_HANDLERS = {
    _aten.is_same_size.default,
    _aten._amp_foreach_non_finite_check_and_unscale_.default,
    _aten.as_strided.default,
    _aten.is_pinned.default,
}


def _copy_of_dispatcher() -> Any:
    """Copy torch's dispatcher for DTensors, but for its table of rules, which stays shared."""
    dispatcher: Any = copy.copy(DTensor._op_dispatcher)
    dispatcher.sharding_propagator = propagator_of_uneven_rows(DTensor._op_dispatcher.sharding_propagator)
    return dispatcher


_dispatcher = _copy_of_dispatcher()


class _Traits(NamedTuple):
    """Facts about an operation that do not depend on its arguments."""

    writes: bool  # in place: its first argument is its result
    takes_out: bool
    is_view: bool
    writes_list: bool  # its first argument
    run_locally: Callable[..., Any] | None  # returns NotImplemented for arguments with different placements


def run(
    kind: type[DTensor], op: _Op, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Run an operation of which an argument is of class ``kind``, as its ``__torch_dispatch__``; results are of that class.

    Ranks: all of the tensors' mesh where placements differ, or the operation reduces.
    """
    kwargs = kwargs or {}
    traits = _traits(op)
    if traits.run_locally is not None:
        result = traits.run_locally(kind, op, args, kwargs, traits)
        if result is not NotImplemented:
            return result
    if op in _FILLS and isinstance(args[0], kind):
        return _fill(op, args, kwargs)
    if op is _aten.index_put_.default and isinstance(args[0], kind) and not any(map(_is_dtensor, (*args[1], args[2]))):
        return _index_put(op, args, kwargs)
    if op is _aten._local_scalar_dense.default:
        return _number(args[0])
    _refuse_mixed(op, args, kwargs)
    result = _run_as_torch(kind, op, args, kwargs, traits)
    if traits.writes_list:
        _count_writes(args[0])
    return result


def _number(tensor: DTensor) -> Any:
    """Return the number that the whole tensor holds: ``item()``, ``float()`` and ``bool()``.

    Torch returns this rank's part of a sum or norm that no operation has reduced yet (``float(p.norm())``). Ranks: all of the tensor's
    mesh, where it is not replicated.
    """
    is_whole = all(placement.is_replicate() for placement in tensor.placements)
    return (tensor._local_tensor if is_whole else tensor.full_tensor()).item()


_FILLS = {
    _aten.normal_.default,
    _aten.uniform_.default,
    _aten.bernoulli_.float,
    _aten.exponential_.default,
    _aten.log_normal_.default,
    _aten.cauchy_.default,
    _aten.random_.default,
    _aten.random_.to,
    getattr(_aten.random_, "from"),  # whose name is no identifier
}


def _fill(op: _Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw the whole tensor, and keep this rank's part of it.

    Each rank draws from its own generator: with equal seeds these are the numbers of the unsharded tensor; with others, the
    parts are as independent as the seeds. Replicas are made equal to the first one.

    Ranks: all of the tensor's mesh.
    """
    target = args[0]
    local = target._local_tensor
    whole = torch.empty(target.shape, dtype=local.dtype, device=local.device)
    op(whole, *args[1:], **kwargs)
    write_part(target, local_rows(target, whole))
    return target


def _index_put(op: _Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write what plain ``values`` at plain ``indices`` of the whole tensor leave for this rank's part of it.

    Where ranks differ, the parts are each rank's, and replicas are made equal to the first one.

    Ranks: all of the tensor's mesh.
    """
    target, indices, values, *rest = args
    accumulates = rest[0] if rest else kwargs.get("accumulate", False)
    whole = torch.zeros(target.shape, dtype=target.dtype, device=target.device)
    op(whole, indices, values, accumulates)
    is_written = torch.zeros(target.shape, dtype=torch.bool, device=target.device)
    op(is_written, indices, torch.ones((), dtype=torch.bool, device=target.device))
    local, part = memory_of(target._local_tensor, writes=False), local_rows(target, whole)
    write_part(target, torch.where(local_rows(target, is_written), local + part if accumulates else part, local))
    return target


@functools.cache
def _traits(op: _Op) -> _Traits:
    schema = op._schema
    name, tags = schema.name.split("::")[-1], op.tags
    writes = name.endswith("_")
    takes_out = not writes and "out" in schema.overload_name
    is_view = schema._is_view_op()
    is_plain = not (takes_out or is_view or torch.Tag.nondeterministic_seeded in tags)
    is_list = name.startswith(LIST_PREFIXES)
    returns_one = len(schema.returns) == 1 and isinstance(schema.returns[0].type, torch.TensorType)
    writes_list = is_list and name[:4] != "_amp" and any(map(_is_written_list, schema.arguments[:1]))
    run_locally: Callable[..., Any] | None = None
    if op is _aten.detach.default:
        run_locally = _detach
    elif is_list:
        if is_plain and len(schema.returns) <= 1 and name[:4] != "_amp" and name not in LIST_REDUCTIONS | NORMS:
            run_locally = _run_list
    elif is_plain and returns_one and (torch.Tag.pointwise in tags or name in _ELEMENTWISE):
        run_locally = _run_elementwise
    return _Traits(writes, takes_out, is_view, writes_list, run_locally)


def _is_written_list(argument: Any) -> bool:
    is_written = argument.alias_info is not None and argument.alias_info.is_write
    return is_written and isinstance(argument.type, torch.ListType)


# Element by element although torch does not tag them as pointwise.
_ELEMENTWISE = {"copy_", "fill_", "zero_", "clone"}


def _run_elementwise(
    kind: type[DTensor], op: _Op, args: tuple[Any, ...], kwargs: dict[str, Any], traits: _Traits
) -> Any:
    """Run an elementwise operation on local tensors if all tensors have the same placements, shape and dtype, or are scalars."""
    first = args[0]
    if not isinstance(first, DTensor):
        return NotImplemented
    spec = first._spec
    local = [first._local_tensor]
    for value in args[1:]:
        if isinstance(value, DTensor):
            own = value._spec
            if own is not spec and (id(own), id(spec)) not in _equal and not _are_equal(own, spec):
                return NotImplemented
            value = value._local_tensor
        elif isinstance(value, list | tuple) or (isinstance(value, torch.Tensor) and value.dim()):
            return NotImplemented
        local.append(value)
    if id(spec) not in _whole_values and not _has_whole_values(spec):
        return NotImplemented
    if not _NUMBERS.issuperset(kwargs):
        return NotImplemented
    result = op._op(*local, **kwargs)  # OpOverload.__call__ would add a call
    return first if traits.writes else _over(kind, result, spec)


# Keyword arguments that are numbers, or change the results' dtype at most.
_NUMBERS = {"alpha", "value", "rounding_mode", "dtype", "non_blocking"}


def _run_list(kind: type[DTensor], op: _Op, args: tuple[Any, ...], kwargs: dict[str, Any], traits: _Traits) -> Any:
    """Run an operation on lists on local tensors, if those that meet have the same placements and shape, or are scalars.

    An optimizer's step comes here for each list, so no line of Python is for one parameter, once specs have met.
    """
    first = args[0] if args else None
    if not isinstance(first, list | tuple) or not first:
        return NotImplemented
    try:
        specs = list(map(_SPEC, first))
    except AttributeError:  # a plain tensor leads
        return NotImplemented
    local = [_local_list(value, specs) for value in args]
    named = {name: _local_list(value, specs) for name, value in kwargs.items()}
    if any(value is NotImplemented for value in (*local, *named.values())):
        return NotImplemented
    results = op(*local, **named)
    if traits.writes_list:
        _count_writes(first)
    if not op._schema.returns:
        return None
    if list(map(_DTYPE, results)) == list(map(_SPEC_DTYPE, specs)):
        return list(map(functools.partial(_NEW, kind, requires_grad=False), results, specs))
    return [_over(kind, result, spec) for result, spec in zip(results, specs, strict=True)]


_SPEC, _LOCAL, _DTYPE = attrgetter("_spec"), attrgetter("_local_tensor"), attrgetter("dtype")
_SPEC_DTYPE = attrgetter("tensor_meta.dtype")
# Makes a DTensor without its __init__, which does nothing in three calls.
_NEW: Any = DTensor.__new__


def _local_list(value: Any, specs: list[DTensorSpec]) -> Any:
    """Return the local tensors of a list whose elements meet tensors of these specs; NotImplemented if one lies otherwise."""
    if isinstance(value, torch.Tensor):
        return NotImplemented if value.dim() or isinstance(value, DTensor) else value
    if not isinstance(value, list | tuple) or not value or not isinstance(value[0], torch.Tensor):
        return value
    if len(value) != len(specs):
        return NotImplemented
    if not isinstance(value[0], DTensor):
        are_scalars = set(map(type, value)) == {torch.Tensor} and not any(map(torch.Tensor.dim, value))
        return value if are_scalars else NotImplemented
    try:
        return list(map(_LOCAL, value)) if _meet(list(map(_SPEC, value)), specs) else NotImplemented
    except AttributeError:  # a plain tensor among them
        return NotImplemented


# Specs that were found to be equal, by identity: those that are held here keep it. Torch's own caches hold specs as well.
_equal: dict[tuple[int, int], tuple[DTensorSpec, DTensorSpec]] = {}


def _are_equal(own: DTensorSpec, other: DTensorSpec) -> bool:
    if own != other:
        return False
    _remember(_equal, (id(own), id(other)), (own, other))
    return True


# Specs without Partial, by identity.
_whole_values: dict[int, DTensorSpec] = {}


def _has_whole_values(spec: DTensorSpec) -> bool:
    if any(placement.is_partial() for placement in spec.placements):
        return False
    _remember(_whole_values, id(spec), spec)
    return True


def _remember(found: dict[Any, Any], key: Any, value: Any) -> None:
    if len(found) >= _MOST_REMEMBERED:
        found.clear()
    found[key] = value


# The same for lists of specs that meet.
_met: dict[Any, tuple[list[DTensorSpec], list[DTensorSpec]]] = {}
_MOST_REMEMBERED = 4096


def _meet(own: list[DTensorSpec], others: list[DTensorSpec]) -> bool:
    """Return whether elements of the tensors with these specs lie next to each other on each rank, pair by pair."""
    key = tuple(map(id, own)), tuple(map(id, others))
    if key in _met:
        return True
    found = all(
        a.placements == b.placements
        and a.shape == b.shape
        and a.mesh == b.mesh
        and not any(placement.is_partial() for placement in a.placements)
        for a, b in zip(own, others, strict=True)
    )
    if found:
        _remember(_met, key, (own, others))
    return found


def _detach(kind: type[DTensor], op: _Op, args: tuple[Any, ...], kwargs: dict[str, Any], traits: _Traits) -> DTensor:
    (tensor,) = args
    found: DTensor = _NEW(kind, tensor._local_tensor.detach(), tensor._spec, requires_grad=False)
    torch._functionalize_unsafe_set(found, tensor)  # a view of the same memory, as far as torch can see
    return found


def _over(kind: type[DTensor], local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Make a tensor over the local result of an elementwise operation."""
    meta = spec.tensor_meta
    assert meta is not None
    if local.dtype != meta.dtype:
        spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=TensorMeta(meta.shape, meta.stride, local.dtype))
    return _NEW(kind, local, spec, requires_grad=False)


def _run_as_torch(kind: type[DTensor], op: _Op, args: tuple[Any, ...], kwargs: dict[str, Any], traits: _Traits) -> Any:
    """Run an operation through torch's steps: propagate placements, redistribute, run on local tensors, wrap."""
    handler: Any = DTensor._op_dispatcher._custom_op_handlers.get(op)
    if handler is not None:
        if op not in _RIGHT_HANDLERS and any(map(is_uneven, tensors_in((*args, *kwargs.values())))):
            raise NotImplementedError(f"{op} takes all shards to be even, which RowShard is not; {REMEDY}")
        return _as_kind(kind, handler(op, args, kwargs))
    try:
        info = _dispatcher.unwrap_to_op_info(op, args, kwargs)
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise RuntimeError(
            f"{op} must get only plain tensors or only DTensors, got both. In backward: a loss that adds sums or norms of sharded "
            "parameters must add plain tensors, `loss + penalty.full_tensor()`. Elsewhere: full_tensor() converts a DTensor to a plain "
            "tensor, and torch.distributed.tensor.distribute_tensor() does the reverse"
        ) from error
    try:
        sharding = _dispatcher._propagate_op_sharding_dispatch_slow_path(op, args, kwargs, info, True)
    except NotImplementedError as error:  # torch 2.11 has rules for fewer operations
        raise NotImplementedError(f"{error} Placements of the tensor are uneven; {REMEDY}") from error
    if not isinstance(sharding, OutputSharding):
        return sharding  # of an operation that torch has decomposed
    info.output_sharding = sharding
    local = _dispatcher._dispatch_get_local_results_slow_path(op, args, info)
    is_equal = sharding.output_spec is None and op is _aten.equal.default
    if traits.writes or traits.takes_out or is_equal:
        is_here = info.compute_mesh.get_coordinate() is not None
        return _dispatcher._dispatch_fast_path_python_tail(
            op, args, kwargs, info.compute_mesh, sharding, local, is_here, traits.writes, traits.takes_out
        )
    result = _as_kind(kind, _dispatcher.wrap(local, sharding.output_spec))
    return return_and_correct_aliasing(op, args, kwargs, result) if traits.is_view else result


def _as_kind(kind: type[DTensor], result: Any) -> Any:
    if isinstance(result, DTensor):
        return result if isinstance(result, kind) else kind(result._local_tensor, result._spec, requires_grad=False)
    if isinstance(result, list | tuple):
        return type(result)(_as_kind(kind, item) for item in result)
    return result


def _count_writes(tensors: Sequence[torch.Tensor]) -> None:
    """Count an in-place operation on a list as one write to each tensor, as torch does for plain tensors.

    For DTensors autograd leaves that to the kernel, which sees local tensors alone, and counts on some devices only. Delete this when
    ``torch._foreach_mul_([dtensor], 2)`` raises ``dtensor._version`` on the CPU.
    """
    torch.autograd.graph.increment_version(tensors)


def _refuse_mixed(op: _Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse an uneven tensor next to a plain one, or in torch's DistributedDataParallel, with the likely cause."""
    if op not in _LAYERS and op not in _REPLICAS and op is not _aten.copy_.default:
        return
    found = list(tensors_in((*args, *kwargs.values())))
    sharded = next(filter(is_uneven, found), None)
    plain = next((tensor for tensor in found if not isinstance(tensor, DTensor) and tensor.numel() != 1), None)
    if op in _REPLICAS:
        if op is not _aten.cat.default or (sharded is not None and plain is not None):
            raise NotImplementedError(
                f"{op} must get plain tensors, got DTensors, of which ranks hold rows; call full_tensor() on them before. If "
                "DistributedDataParallel is around: take it away, fully_shard averages gradients itself"
            )
    elif sharded is None or plain is None:
        return
    elif op is not _aten.copy_.default:
        raise RuntimeError(
            f"{op} must get whole weights, got one of shape {list(sharded.shape)} of which ranks hold rows (RowShard), beside a "
            f"plain tensor: {USE_IN_FORWARD}"
        )
    elif is_uneven(args[0]):
        raise RuntimeError(
            f"{op} on a parameter of shape {list(args[0].shape)} of which ranks hold rows (RowShard) must get tensors that are "
            f"sharded alike, got a plain one of shape {list(plain.shape)}; write `parameter.copy_(distribute_tensor(whole, "
            "parameter.device_mesh, parameter.placements))`, of torch.distributed.tensor, where `whole` has all values "
            "(parameter.full_tensor() returns those there are)"
        )


def _is_dtensor(value: object) -> bool:
    return isinstance(value, DTensor)


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among an operation's arguments, also those in lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def list_writes() -> Iterator[_Op]:
    """Yield the operations that write to the list of tensors that is their first argument."""
    for full_name in torch._C._dispatch_get_all_op_names():
        if full_name.startswith(("aten::_foreach_", "aten::_fused_")):
            name, _, overload = full_name.removeprefix("aten::").partition(".")
            operation = getattr(getattr(_aten, name), overload or "default")
            if _traits(operation).writes_list:
                yield operation
