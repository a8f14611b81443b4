"""Run operations on ``UnevenDTensor``: on the local tensors where placements allow that, else by the steps of torch's dispatcher.

The dispatcher is a copy of torch's object, with a propagator that knows uneven rows (propagation.py). Torch's object is unchanged,
and so are all other DTensors.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch._prims_common import infer_size, make_contiguous_strides_for
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OutputSharding
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves

from megatron.core.distributed.fsdp.config.torch_versions import REDUCES_MIXED_PARTIALS
from megatron.core.distributed.fsdp.dtensor.placements import (
    REMEDY,
    RowShard,
    is_uneven,
    local_rows,
    spread,
    write_part,
)
from megatron.core.distributed.fsdp.dtensor.propagation import (
    LIST_PREFIXES,
    LIST_REDUCTIONS,
    NORMS,
    USE_IN_FORWARD,
    UnevenPropagator,
    name_of,
)

_aten = torch.ops.aten
_Kind = Any  # type[UnevenDTensor], which imports this module
_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]
_Op = Any  # torch._ops.OpOverload, which mypy takes for a function

# Operations are named without namespace and overload.
_FILLS = {"normal_", "uniform_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "random_"}
# It joins all parameters in one tensor and broadcasts it, which torch refuses for DTensors without naming the cause.
_OF_REPLICAS = "If DistributedDataParallel wraps the module: remove it, fully_shard averages gradients itself"
# Handlers of torch that are right for uneven rows: they read metadata, or run the operation on local tensors.
_RIGHT_HANDLERS = {"is_same_size", "_amp_foreach_non_finite_check_and_unscale_", "as_strided", "is_pinned"}
# Element by element although torch does not tag them as pointwise.
_ELEMENTWISE = {"copy_", "fill_", "zero_", "clone"}
# Keyword arguments of elementwise operations that are numbers, or change the results' dtype at most.
_NUMBERS = {"alpha", "value", "rounding_mode", "dtype", "non_blocking"}


# A copy of torch's dispatcher, but for its table of rules, which stays shared: all other DTensors run by torch's own.
_dispatcher: Any = copy.copy(DTensor._op_dispatcher)
_dispatcher.sharding_propagator = UnevenPropagator(DTensor._op_dispatcher.sharding_propagator)


class _Traits(NamedTuple):
    """Facts about an operation that do not depend on its arguments."""

    writes: bool  # in place: its first argument is its result
    writes_list: bool  # its first argument
    # Runs before the steps of torch's dispatcher; returns NotImplemented for what is left to them.
    handling: Callable[..., Any] | None


def run(kind: _Kind, op: _Op, types: Any, args: _Args = (), kwargs: _Kwargs | None = None) -> Any:
    """Run an operation with an argument of class ``kind``, as its ``__torch_dispatch__``; results are of that class.

    Ranks: all of the tensors' mesh where placements differ, or the operation reduces.
    """
    # See [Note: class of DTensors].
    kwargs = kwargs or {}
    traits = traits_of(op)
    result = NotImplemented if traits.handling is None else traits.handling(kind, op, args, kwargs, traits)
    if result is NotImplemented:
        args = args if REDUCES_MIXED_PARTIALS else _reduce_mixed_partials(args)
        result = _run_as_torch(kind, op, args, kwargs, traits)
    if traits.writes_list:
        # As torch does for plain tensors. For DTensors autograd leaves that to the kernel, which sees only local tensors, and counts on
        # some devices only. Delete this when ``torch._foreach_mul_([dtensor], 2)`` raises ``dtensor._version`` on the CPU.
        torch.autograd.graph.increment_version(args[0])
    return result


def _reduce_mixed_partials(args: _Args) -> _Args:
    """Reduce norms that meet other tensors with unreduced parts: torch 2.11 has no way from parts of a norm to those of a sum.

    Ranks: all of the tensors' mesh.
    """
    tensors = [value for value in args if isinstance(value, DTensor)]
    kinds = {type(each) for tensor in tensors for each in tensor.placements if each.is_partial()}
    if len(kinds) < 2:
        return args
    norms = tuple(kinds - {Partial})
    return tuple(
        value.redistribute(placements=[Replicate() if isinstance(each, norms) else each for each in value.placements])
        if isinstance(value, DTensor)
        else value
        for value in args
    )


@functools.cache
def traits_of(op: _Op) -> _Traits:
    name = name_of(op)
    is_list, writes = name.startswith(LIST_PREFIXES) and not name.startswith("_amp"), name.endswith("_")
    return _Traits(writes, is_list and writes, _handling_of(op, name, is_list))


def _takes_out(op: _Op) -> bool:
    """Return whether this is the overload of an operation that writes to tensors given as ``out``."""
    return not op._schema.name.endswith("_") and "out" in op._schema.overload_name


def _handling_of(op: _Op, name: str, is_list: bool) -> Callable[..., Any] | None:
    """Return the handling of an operation's class."""
    schema = op._schema
    if op in _HANDLINGS:
        return _HANDLINGS[op]
    if name in _FILLS and sum(isinstance(argument.type, torch.TensorType) for argument in schema.arguments) == 1:
        return _write_whole
    if (
        _takes_out(op)
        or schema._is_view_op()
        or torch.Tag.nondeterministic_seeded in op.tags
        or len(schema.returns) > 1
    ):
        return None
    if is_list:
        return None if name in LIST_REDUCTIONS | NORMS else _run_list
    returns_one = len(schema.returns) == 1 and isinstance(schema.returns[0].type, torch.TensorType)
    is_elementwise = torch.Tag.pointwise in op.tags or name in _ELEMENTWISE
    return _run_elementwise if returns_one and is_elementwise else None


# ---- handlings: (class of the results, operation, its arguments, its traits) -> result -------------------------------


def _number(kind: _Kind, op: _Op, args: _Args, *_: Any) -> Any:
    """Return the number that the whole tensor holds: ``item()``, ``float()`` and ``bool()``.

    Torch returns this rank's part of a sum or norm that no operation has reduced yet (``float(p.norm())``). Ranks: all of the tensor's
    mesh, where it is not replicated.
    """
    (tensor,) = args
    # Where ranks decide by this number (`if p.norm() > 1:`), their own parts would send them different ways.
    is_whole = all(placement.is_replicate() for placement in tensor.placements)
    return (tensor._local_tensor if is_whole else tensor.full_tensor()).item()


def _write_whole(kind: _Kind, op: _Op, args: _Args, kwargs: _Kwargs, *_: Any) -> Any:
    """Write the whole tensor, by a random fill or plain values at plain indices, and keep this rank's part of it.

    Each rank draws from its own generator: with equal seeds these are the numbers of the unsharded tensor; with others, the
    parts are as independent as the seeds. Replicas are made equal to the first one.

    Ranks: all of the tensor's mesh.
    """
    target, *others = args
    if not isinstance(target, kind) or any(isinstance(value, DTensor) for value in _tensors_in(others, kwargs)):
        return NotImplemented
    # A fill of the local tensor would depend on the split, and weights would begin elsewhere on another number of ranks.
    whole = spread(target)
    op(whole, *others, **kwargs)
    write_part(target, local_rows(target, whole))
    return target


def _detach(kind: _Kind, op: _Op, args: _Args, *_: Any) -> DTensor:
    (tensor,) = args
    found: DTensor = _NEW(kind, tensor._local_tensor.detach(), tensor._spec, requires_grad=False)
    torch._functionalize_unsafe_set(found, tensor)  # a view of the same memory, as far as torch can see
    return found


def _view(kind: _Kind, op: _Op, args: _Args, kwargs: _Kwargs, *_: Any) -> Any:
    """View a tensor in another shape, if it is whole on each rank, or each rank's rows are whole rows of that shape too."""
    tensor, size = args
    spec = tensor._spec
    seen = torch.Size(infer_size(size, spec.shape.numel()))
    placements = list(spec.placements)
    cut = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
    is_contiguous = tensor.stride() == make_contiguous_strides_for(spec.shape)
    if not seen.numel():  # it is whole on each rank, and torch's rule for such a view loops forever (torch 2.13)
        cut, placements = [], [Replicate()] * len(placements)
    elif len(cut) > 1 or not is_contiguous:
        return NotImplemented
    local_shape = list(seen)
    for axis in cut:
        own, num_ranks = placements[axis], spec.mesh.size(axis)
        placement = own.seen_as(spec.shape, seen, num_ranks=num_ranks) if isinstance(own, RowShard) else None
        if placement is None:
            return NotImplemented
        placements[axis] = placement
        begin, end = placement.rows(seen[0], rank=spec.mesh.get_local_rank(axis), num_ranks=num_ranks)
        local_shape[0] = end - begin
    local, stride = tensor._local_tensor.view(local_shape), make_contiguous_strides_for(seen)
    result = kind.over(local, spec.mesh, placements, shape=seen, stride=stride)
    return return_and_correct_aliasing(op, args, kwargs, result)


_HANDLINGS: dict[_Op, Callable[..., Any]] = {
    _aten.detach.default: _detach,
    _aten.index_put_.default: _write_whole,
    _aten._local_scalar_dense.default: _number,
    _aten.view.default: _view,
}


def _run_elementwise(kind: _Kind, op: _Op, args: _Args, kwargs: _Kwargs, traits: _Traits) -> Any:
    """Run an elementwise operation on local tensors if all tensors have the same placements and shape, or are scalars."""
    first = args[0]
    if not isinstance(first, DTensor):
        return NotImplemented
    specs, local = [first._spec], [first._local_tensor]
    for value in args[1:]:
        if isinstance(value, DTensor):
            specs.append(value._spec)
            value = value._local_tensor
        elif isinstance(value, list | tuple) or (isinstance(value, torch.Tensor) and value.dim()):
            return NotImplemented
        local.append(value)
    key = tuple(map(id, specs))
    if not _NUMBERS.issuperset(kwargs) or not (key in _met or _meet(specs, specs[:1] * len(specs), key)):
        return NotImplemented
    result = op._op(*local, **kwargs)  # OpOverload.__call__ would add a call
    return first if traits.writes else _over(kind, result, specs[0])


def _run_list(kind: _Kind, op: _Op, args: _Args, kwargs: _Kwargs, traits: _Traits) -> Any:
    """Run an operation on lists on local tensors, if those that meet have the same placements and shape, or are scalars."""
    # An optimizer's step comes here for each list, so no line of Python is for one parameter, once specs have met.
    # See [Note: the host's budget].
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
        return _local_scalar(value)
    if not isinstance(value, list | tuple) or not value or not isinstance(value[0], torch.Tensor):
        return value
    if len(value) != len(specs):
        return NotImplemented
    if set(map(type, value)) == {torch.Tensor}:
        return NotImplemented if any(map(torch.Tensor.dim, value)) else value
    with contextlib.suppress(AttributeError):  # a plain tensor among them
        own = list(map(_SPEC, value))
        key = tuple(map(id, own)), tuple(map(id, specs))
        if key in _met or _meet(own, specs, key):
            return list(map(_LOCAL, value))
    scalars = list(map(_local_scalar, value))
    return NotImplemented if any(scalar is NotImplemented for scalar in scalars) else scalars


def _local_scalar(value: torch.Tensor) -> Any:
    """Return a tensor of one number that is the same on all ranks, such as the number of steps; NotImplemented for others."""
    if not isinstance(value, DTensor):
        return NotImplemented if value.dim() else value
    return value._local_tensor if not value.dim() and value._spec.is_replicated() else NotImplemented


# Lists of specs that meet, by identity: those that are held here keep it. Torch's own caches hold specs as well. Specs are compared
# once: an optimizer's step comes here for each parameter or list, and looks for the key before it calls ``_meet``.
_met: dict[Any, tuple[list[DTensorSpec], list[DTensorSpec]]] = {}
_MOST_REMEMBERED = 4096


def _meet(own: list[DTensorSpec], others: list[DTensorSpec], key: tuple[Any, ...]) -> bool:
    """Return whether tensors with these specs have their elements at the same places on each rank, pair by pair.

    Args:
        key: of the identities of the specs, under which a positive answer is remembered.
    """
    for a, b in zip(own, others, strict=True):
        is_partial = any(placement.is_partial() for placement in a.placements)
        if is_partial or a.placements != b.placements or a.shape != b.shape or a.mesh != b.mesh:
            return False
    if len(_met) >= _MOST_REMEMBERED:
        _met.clear()
    _met[key] = own, others
    return True


def _over(kind: _Kind, local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Make a tensor over the local result of an elementwise operation."""
    meta = spec.tensor_meta
    assert meta is not None
    if local.dtype != meta.dtype:
        spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=TensorMeta(meta.shape, meta.stride, local.dtype))
    return _NEW(kind, local, spec, requires_grad=False)


# ---- the steps of torch's dispatcher --------------------------------------------------------------------------------


def _run_as_torch(kind: _Kind, op: _Op, args: _Args, kwargs: _Kwargs, traits: _Traits) -> Any:
    """Propagate placements, redistribute, run on local tensors, and wrap the results."""
    # Handlers in torch's table take all shards to be even, and are asked before any rule.
    handler: Any = DTensor._op_dispatcher._custom_op_handlers.get(op)
    if handler is not None:
        if name_of(op) not in _RIGHT_HANDLERS and any(map(is_uneven, _tensors_in(args, kwargs))):
            raise NotImplementedError(
                f"{op} takes all shards to be even, which RowShard is not; {REMEDY}. In forward: {USE_IN_FORWARD}"
            )
        return _as_kind(kind, handler(op, args, kwargs))
    try:
        info = _dispatcher.unwrap_to_op_info(op, args, kwargs)
    except (RuntimeError, ValueError) as error:
        tensors = _tensors_in(args, kwargs)
        plain = next((tensor for tensor in tensors if not isinstance(tensor, DTensor) and tensor.numel() != 1), None)
        if plain is None:
            raise
        sharded = next(tensor for tensor in tensors if isinstance(tensor, DTensor))
        raise NotImplementedError(
            f"{op} must get only plain tensors or only DTensors, got a plain one of shape {list(plain.shape)} next to a DTensor of shape "
            f"{list(sharded.shape)} placed by {sharded.placements}. full_tensor() converts "
            "a DTensor to a plain tensor, and distribute_tensor(whole, parameter.device_mesh, parameter.placements) of "
            "torch.distributed.tensor does the reverse, as to write `parameter.copy_(...)`. In backward: a loss that adds sums or norms of sharded "
            f"parameters must add plain tensors, `loss + penalty.full_tensor()`. In forward: {USE_IN_FORWARD}. {_OF_REPLICAS}"
        ) from error
    try:
        sharding = _dispatcher._propagate_op_sharding_dispatch_slow_path(op, args, kwargs, info, True)
    except NotImplementedError as error:  # torch 2.11 has rules for fewer operations
        raise NotImplementedError(f"{error} Placements of the tensor are uneven; {REMEDY}. {_OF_REPLICAS}") from error
    if not isinstance(sharding, OutputSharding):
        return sharding  # of an operation that torch has decomposed
    info.output_sharding = sharding
    local = _dispatcher._dispatch_get_local_results_slow_path(op, args, info)
    is_equal = sharding.output_spec is None and op is _aten.equal.default
    takes_out = _takes_out(op)
    if traits.writes or takes_out or is_equal:
        is_here = info.compute_mesh.get_coordinate() is not None
        return _dispatcher._dispatch_fast_path_python_tail(
            op, args, kwargs, info.compute_mesh, sharding, local, is_here, traits.writes, takes_out
        )
    result = _as_kind(kind, _dispatcher.wrap(local, sharding.output_spec))
    return return_and_correct_aliasing(op, args, kwargs, result) if op._schema._is_view_op() else result


def _as_kind(kind: _Kind, result: Any) -> Any:
    if isinstance(result, list | tuple):
        return type(result)(_as_kind(kind, item) for item in result)
    is_torchs = isinstance(result, DTensor) and not isinstance(result, kind)
    return kind(result._local_tensor, result._spec, requires_grad=False) if is_torchs else result


def _tensors_in(args: Sequence[Any], kwargs: _Kwargs) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
