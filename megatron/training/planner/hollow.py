"""Run PyTorch code for its memory and its order of operations alone: large floating-point tensors have no values.

[Note: hollow tensors] A model of any size is planned by its own code, and by the engine's, not by formulas beside them. Under
``HollowMode`` tensors are ordinary CPU tensors whose memory nobody touches, so that the system never provides it. An
operation that would read or write a large floating-point tensor is not computed: its results are allocated in the shapes that
PyTorch's meta device says. What decides what runs is computed: views, and integers and booleans (masks, indices, counts of
tokens by expert). Small floating-point results of large inputs are ones: a loss, a norm, a scale.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from megatron.training.planner.ledger import Ledger

SMALL_NUMEL = 256  # floating-point tensors up to this size have values

# Of these, tensors up to so many elements have values: tokens times experts, not weights in bytes.
_MOST_INDICES = 2**25
_INDICES = {torch.bool: _MOST_INDICES, torch.int16: 2**21, torch.int32: _MOST_INDICES, torch.int64: _MOST_INDICES}
_PROVIDED_LATE_NBYTES = 2**20
_UNRESERVED = 0x4000 if sys.platform == "linux" else 0  # MAP_NORESERVE, which Python 3.11 does not name

aten = torch.ops.aten
# They make new tensors over the same memory, though their schemas do not say so.
_VIEWS = {
    aten._unsafe_view.default,
    aten._reshape_alias.default,
    aten.detach.default,
    aten.alias.default,
    aten.lift_fresh.default,
    aten.set_.source_Storage,
    aten.set_.source_Storage_storage_offset,
    aten.set_.source_Tensor,
    aten.resize_.default,
}


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation that a device would run.

    Attributes:
        name: of the operator, such as ``aten.mm``; of a fused function, its own.
        shapes: of its tensors, inputs first.
        dtypes: likewise.
        nbytes: that it reads and writes at least: each tensor once.
        stream: the role of the stream on which it was issued.
        group_size: ranks of a collective; 0 of a computation.
        group_span: distance between the first and the last rank of a collective.
        is_causal: of attention.
        share: of the rows of a grouped product, those that are not padding.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    nbytes: int
    stream: str
    group_size: int = 0
    group_span: int = 0
    is_causal: bool = False
    share: float = 1.0


def is_composed(types: Sequence[type]) -> bool:
    """Return whether one of these tensors has others inside: a DTensor, a quantised tensor."""
    return any(getattr(kind, "__torch_dispatch__", _PLAIN) is not _PLAIN for kind in types)


def operation(
    name: str,
    tensors: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    *,
    stream: str = "compute",
    group: tuple[int, int] = (0, 0),
    is_causal: bool = False,
    share: float = 1.0,
) -> Operation:
    """Describe an operation by its inputs and results.

    Args:
        group: ranks of a collective, and the distance from the first to the last one.
    """
    inputs = {id(tensor) for tensor in tensors}
    everything = [*tensors, *(result for result in results if id(result) not in inputs)]
    if group[0]:  # of a collective the whole buffer is told, which is the larger one
        nbytes = max(map(_nbytes, everything), default=0)
    else:
        # What is written in place is read too.
        nbytes = sum(map(_nbytes, everything)) + sum(_nbytes(result) for result in results if id(result) in inputs)
    shapes, dtypes = [tuple(tensor.shape) for tensor in everything], [tensor.dtype for tensor in everything]
    return Operation(name, tuple(shapes), tuple(dtypes), nbytes, stream, *group, is_causal, share)


@dataclass
class Recording:
    """What is recorded of the operations, in order: ``Operation`` and whatever else is put in between.

    Attributes:
        entries: in the order of the host.
        stream: role of the stream that is current now.
        is_on: operations are recorded.
        at_event: called whenever the engine records an event on a stream; None: nothing is.
    """

    entries: list[Any] = field(default_factory=list)
    stream: str = "compute"
    is_on: bool = False
    at_event: Callable[[], None] | None = None


class HollowMode(TorchDispatchMode):
    """A scope in which tensors are hollow ([Note: hollow tensors]).

    Attributes:
        ledger: memory of all tensors that operations in the scope have returned.
        recording: operations, while it is on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ledger, self.recording = Ledger(), Recording()
        self._of_fused: dict[Any, Any] = {}
        self._fused = 0
        self._groups: dict[str, tuple[int, int]] = {}
        self._sent: Any = None

    # ---- operations ---------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if FakeTensor in types or _is_meta(args) or kwargs.get("device") == _META:
            return func(*args, **kwargs)
        if is_composed(types):
            return NotImplemented  # what it is made of comes here
        if kwargs.get("pin_memory"):
            result = self._allocate(func, args, {**kwargs, "pin_memory": False}, [])
            self.ledger.note_of_host(result)
            return result
        if func.namespace == "c10d":
            return self._communicate(func, args, kwargs)
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        if func.is_view or func in _VIEWS:
            result = func(*args, **kwargs)
            if func in _VIEWS:
                self._note(result)
            return result
        tensors = tensors_in((*args, *kwargs.values()))
        written = _written(func, args, kwargs)
        if tensors and all(map(_has_values, tensors)) and _stays_small(tensors):
            result = self._compute(func, args, kwargs, tensors, written)
        elif written is not _NOTHING_WRITTEN:
            result = written
        else:
            result = self._allocate(func, args, kwargs, tensors)
        self._note(result)
        if self.recording.is_on and not self._fused and func not in _EMPTY:
            facts = {"is_causal": is_causal_attention(func, args), "share": _share_of_rows(func, tensors)}
            self._add(str(func._overloadpacket), tensors, tensors_in((result,)), **facts)
        return result

    def _compute(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor], written: Any
    ) -> Any:
        """Compute an operation, unless a CPU has no kernel for it."""
        try:
            return func(*args, **kwargs)
        except (NotImplementedError, RuntimeError):
            if not any(tensor.dtype.is_floating_point for tensor in tensors):
                raise
            return self._allocate(func, args, kwargs, tensors) if written is _NOTHING_WRITTEN else written

    def _allocate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
        """Return results of the right shapes, without computing them."""
        key = _key(func, args, kwargs)
        found = _RESULTS.get(key) if key is not None else None
        if found is None:
            found = _mapped(_Spec.of, torch.Tensor, _on_meta(func, args, kwargs))
            if key is not None:
                _RESULTS[key] = found
        device = next((tensor.device for tensor in tensors), torch.device("cpu"))
        result = _mapped(lambda spec: spec.make(device), _Spec, found)
        if not tensors and isinstance(result, torch.Tensor) and _has_values(result):
            return func(*args, **kwargs)  # torch.arange, torch.zeros of few elements
        _CHOICES.get(func, _nothing)(result, args)
        return result

    def _note(self, result: Any) -> None:
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor):
                self.ledger.note(value)

    def _add(self, name: str, tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor], **facts: Any) -> None:
        self.recording.entries.append(operation(name, tensors, results, stream=self.recording.stream, **facts))

    # ---- fused functions ----------------------------------------------------------------------------------------

    def fused(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that one kernel computes on a device: it keeps no memory but its results."""
        known = self._of_fused.get(key := _key(name, args, kwargs))
        if known is not None and key is not None:
            result = _mapped(lambda spec: spec.make(torch.device("cpu")), _Spec, known)
            self._note(result)
        else:
            result = self._run_fused(function, args, kwargs)
            given = {tensor.untyped_storage()._cdata for tensor in tensors_in((*args, *kwargs.values()))}
            if (
                key is not None
                and isinstance(result, (torch.Tensor, tuple, list))
                and all(
                    tensor.untyped_storage()._cdata not in given and tensor.dtype.is_floating_point
                    for tensor in tensors_in((result,))
                )
            ):
                self._of_fused[key] = _mapped(_Spec.of, torch.Tensor, result)
        if self.recording.is_on and not self._fused:
            self._add(name, tensors_in((*args, *kwargs.values())), tensors_in((result,)))
        return result

    def _run_fused(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.ledger.uncounted_temporaries():
            self._fused += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._fused -= 1

    # ---- collectives --------------------------------------------------------------------------------------------

    def _communicate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = tensors_in((*args, *kwargs.values()))
        if self.recording.is_on:
            group = next((value for value in args if isinstance(value, torch.ScriptObject)), None)
            self._add(str(func._overloadpacket), tensors, [], group=self._group_of(group))
        if all(map(_has_values, tensors)):
            result = func(*args, **kwargs)
            _fill_as_by_equal_ranks(tensors)
            return result
        # Nothing is sent, and the backend would take time for each rank of the group. Operators return their first argument, if any.
        if self._sent is None:
            self._sent = torch.ops.c10d.barrier(torch.empty(1), dist.distributed_c10d._get_default_group().boxed(), [])
        return (args[0], self._sent) if len(func._schema.returns) == 2 else self._sent

    def _group_of(self, group: Any) -> tuple[int, int]:
        """Return the number of ranks of a process group, and the distance from its first to its last one."""
        unboxed = dist.distributed_c10d._get_default_group() if group is None else dist.ProcessGroup.unbox(group)
        found = self._groups.get(unboxed.group_name)
        if found is None:
            ranks = dist.get_process_group_ranks(unboxed)
            found = self._groups[unboxed.group_name] = len(ranks), max(ranks) - min(ranks)
        return found


_META = torch.device("meta")
_RESULTS: dict[Any, Any] = {}
"""What operators return for which arguments: the plans of a search have most of them in common."""
_NOTHING_WRITTEN = object()
_PLAIN = torch.Tensor.__torch_dispatch__


def _fill_as_by_equal_ranks(tensors: list[torch.Tensor]) -> None:
    """Give a collective's output the values that it has where all ranks have the same input: counts of tokens by expert."""
    if len(tensors) == 2 and tensors[0].dtype == tensors[1].dtype and tensors[0].dtype in _INDICES:
        output, source = tensors[0].detach().view(-1), tensors[1].detach().view(-1)
        if source.numel() and output.numel() >= source.numel() and output.numel() % source.numel() == 0:
            output.view(-1, source.numel()).copy_(source.clone())


class _Spec:
    """Shape, strides and dtype of a result."""

    __slots__ = ("dtype", "shape", "stride")

    def __init__(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.stride, self.dtype = shape, stride, dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Spec:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    def make(self, device: torch.device) -> torch.Tensor:
        try:
            made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        except RuntimeError:  # systems refuse to reserve more at once than they have memory
            nbytes = sum((extent - 1) * step for extent, step in zip(self.shape, self.stride, strict=True)) + 1
            return self._of(untouched(nbytes * self.dtype.itemsize))
        if made.numel() <= _INDICES.get(self.dtype, 0):
            nbytes = made.untyped_storage().nbytes()
            return made.zero_() if nbytes < _PROVIDED_LATE_NBYTES else self._of(untouched(nbytes))
        if made.numel() <= SMALL_NUMEL:
            made.fill_(1.0)
        return made

    def _of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        return torch.empty(0, dtype=self.dtype).set_(storage, 0, self.shape, self.stride)


def untouched(nbytes: int) -> torch.UntypedStorage:
    """Return [nbytes] zeros that take memory of this machine only where they are touched, as dropout's masks and arenas never are.

    Raises:
        MemoryError: the system gives no address space without reserving memory for it.
    """
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _UNRESERVED)
    except OSError as error:
        raise no_room(nbytes) from error
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


def no_room(nbytes: int) -> MemoryError:
    """Return the error of a tensor that is too large to plan here: no address space for it, or none that can be resized."""
    return MemoryError(
        f"address space for each tensor of the run must be had, though nothing is written to it, got none for one of {nbytes / 2**30:.0f} "
        "GiB. Let the system give it, with `sysctl vm.overcommit_memory=1`; take a machine with more memory or swap; or split the "
        "model further, as with --expert-model-parallel-size"
    )


def is_causal_attention(func: Any, args: tuple[Any, ...]) -> bool:
    """Return the operator's argument ``is_causal``, where it has one."""
    if "attention" not in func._schema.name:
        return False
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "is_causal":
            return bool(args[position]) if position < len(args) else False
    return False


def _share_of_rows(func: Any, tensors: Sequence[torch.Tensor]) -> float:
    """Return the share of a grouped product's rows that belong to an expert; what comes behind them is not multiplied."""
    if func is not aten._grouped_mm.default or len(tensors) < 3 or not tensors[2].numel():
        return 1.0
    left, right, ends = tensors[:3]
    return int(ends[-1]) / max(left.shape[1] if right.dim() == 2 else left.shape[0], 1)


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among arguments, and in lists of them."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(value)
    return found


def _is_meta(args: tuple[Any, ...]) -> bool:
    """Return whether an operation is of tensors on the meta device."""
    first: Any = next(iter(args), None)
    if isinstance(first, (list, tuple)) and first:
        first = first[0]
    return isinstance(first, torch.Tensor) and first.is_meta


def _has_values(tensor: torch.Tensor) -> bool:
    numel = tensor.numel()
    return numel <= SMALL_NUMEL or numel <= _INDICES.get(tensor.dtype, 0)


def _stays_small(tensors: list[torch.Tensor]) -> bool:
    """Return whether an elementwise operation of these has a result of few elements."""
    if len(tensors) == 1:
        return True
    numel = 1
    for extents in zip_longest(*(tuple(reversed(tensor.shape)) for tensor in tensors), fillvalue=1):
        numel *= max(extents)
    return numel <= _MOST_INDICES


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what an operation that writes into its arguments returns, without running it.

    ``_NOTHING_WRITTEN``: it writes into none, or returns something new besides.
    """
    schema = func._schema
    if not schema.is_mutable:
        return _NOTHING_WRITTEN
    given = {}
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            if value is None:
                return _NOTHING_WRITTEN
            given[frozenset(argument.alias_info.before_set)] = value
    results = []
    for returned in schema.returns:
        alias = returned.alias_info
        if alias is None or frozenset(alias.before_set) not in given:
            return _NOTHING_WRITTEN
        results.append(given[frozenset(alias.before_set)])
    if not results:
        return None
    return results[0] if len(results) == 1 else tuple(results)


def _on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def meta(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    args, kwargs = tree_map_only(torch.Tensor, meta, (args, kwargs))
    if kwargs.get("device") is not None or any(argument.name == "device" for argument in func._schema.arguments):
        kwargs = {**kwargs, "device": torch.device("meta")}
    return func(*args, **kwargs)


def _key(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what stands for a call, of an operator or by name, in a table of results; None where nothing can."""
    try:
        key = function, _facts(args), _facts(kwargs)
        hash(key)
    except (TypeError, NotImplementedError):
        return None
    return key


# Kinds of arguments that say all of themselves.
_FACTS = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def _facts(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.shape, value.stride(), value.dtype)
    if isinstance(value, (tuple, list)):
        return tuple(map(_facts, value))
    if isinstance(value, dict):
        return tuple((name, _facts(part)) for name, part in value.items())
    if not isinstance(value, _FACTS):
        raise TypeError("the table would keep it, with the memory of its tensors")
    return (type(value), value)


def _mapped(function: Callable[[Any], Any], kind: type, value: Any) -> Any:
    """Return a result whose parts of this kind are mapped; it may be a tuple or a list of them."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_mapped(function, kind, part) for part in value)
    return value


def _balanced(result: Any, args: tuple[Any, ...]) -> None:
    """Choose the places of the largest elements in turn, so that all experts get as many tokens."""
    indices = result[1] if isinstance(result, tuple) else result
    if indices.dim() < 2 or not indices.numel():
        return
    chosen, size = indices.shape[-1], args[0].shape[-1]
    rows = torch.arange(indices.numel() // chosen).unsqueeze(1) * chosen
    indices.copy_(((rows + torch.arange(chosen)) % size).view(indices.shape))


def _nothing(result: Any, args: tuple[Any, ...]) -> None:
    pass


_CHOICES: dict[Any, Callable[[Any, tuple[Any, ...]], None]] = {aten.topk.default: _balanced}
_EMPTY = {aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default}
