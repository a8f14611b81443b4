"""Transports by a process group's collectives (NCCL, and gloo in rank order); the comparison of values between ranks."""

from __future__ import annotations

import atexit
import functools
import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.distributed.fsdp.comm.transport import (
    Transport,
    in_ranges,
    scale_and_accumulate,
    scaled_in_advance,
    sum_pieces,
)
from megatron.core.distributed.fsdp.config.mixed_precision import SERVED_DTYPES
from megatron.core.distributed.fsdp.config.torch_versions import all_gather_flat, reduce_scatter_flat

_THREADS_END_S = 0.05
# Differences that an error spells out.
_MAX_NAMED = 8
_Value = TypeVar("_Value")


class ProcessGroupTransport(Transport):
    """The process group's own collectives, straight between full buffers and shards.

    Args:
        group: the ranks.
        gather_group: the same ranks for all-gathers; with a separate communicator they run concurrently with reductions.
    """

    name = "nccl"

    def __init__(self, group: ProcessGroup, gather_group: ProcessGroup) -> None:
        self.group = group
        self.gather_group = gather_group
        self.size = group.size()
        self.rank = group.rank()
        self.ranks = dist.get_process_group_ranks(group)

    def all_gather(self, full: Tensor, shard: Tensor) -> None:
        if full.dtype not in SERVED_DTYPES:
            full, shard = _movable(full), _movable(shard)
        all_gather_flat(self.gather_group, full, shard)

    def reduce_scatter(self, out: Tensor, full: Tensor, *, scale: float = 1.0, accumulate: bool = False) -> None:
        # SUM, not AVG: the scale is applied later, in out's dtype, but for fp16. The sum overwrites this rank's own segment of the
        # input, so that it needs no memory of its own.
        direct = out.dtype == full.dtype and not accumulate
        total = out if direct else full.narrow(0, self.rank * out.numel(), out.numel())
        scale = scaled_in_advance(full, scale)
        reduce_scatter_flat(self.group, total, full)
        sum_pieces(out, (total,), scale=scale, accumulate=accumulate)  # widens, scales and adds in one kernel

    def all_reduce(self, out: Tensor, full: Tensor, *, scale: float = 1.0, accumulate: bool = False) -> None:
        scale = scaled_in_advance(full, scale)
        dist.all_reduce(full, op=dist.ReduceOp.SUM, group=self.group)
        sum_pieces(out, (full,), scale=scale, accumulate=accumulate)

    def broadcast(self, tensor: Tensor) -> None:
        dist.broadcast(_movable(tensor), src=dist.get_global_rank(self.group, 0), group=self.group)

    def maximum(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.gather_group)

    def exchange(self, value: Any) -> list[Any]:
        return gather_values(value, self.group)


class RankOrderTransport(ProcessGroupTransport):
    """A transport that sums in rank order: each rank receives the pieces of its segment and adds them in fp32 or wider.

    So a gradient's sum does not depend on the strategy, on the number of buffers or on the library's ring, and
    strategies can be compared bit for bit. It serves gloo; the cost is one copy of the full buffer. [Note: fixed order
    of reduction].
    """

    name = "gloo"

    def __init__(self, group: ProcessGroup, gather_group: ProcessGroup) -> None:
        super().__init__(group, gather_group)
        _let_threads_end()

    def reduce_scatter(self, out: Tensor, full: Tensor, *, scale: float = 1.0, accumulate: bool = False) -> None:
        pieces = torch.empty_like(full)
        dist.all_to_all_single(pieces, full, group=self.group)
        sum_pieces(out, pieces.view(self.size, -1).unbind(), scale=scale, accumulate=accumulate)

    def all_reduce(self, out: Tensor, full: Tensor, *, scale: float = 1.0, accumulate: bool = False) -> None:
        padded = torch.nn.functional.pad(full, (0, -full.numel() % self.size))
        wide = torch.promote_types(full.dtype, torch.float32)
        shard = torch.empty(padded.numel() // self.size, dtype=wide, device=out.device)
        self.reduce_scatter(shard, padded)
        total = torch.empty_like(padded, dtype=wide)
        all_gather_flat(self.group, total, shard)
        scale_and_accumulate(out, total[: out.numel()], scale=scale, accumulate=accumulate)


def make_process_group_transport(
    group: ProcessGroup, gather_group: ProcessGroup, device: torch.device
) -> ProcessGroupTransport:
    """Make the transport by a process group for buffers on ``device``; on CPUs the one that sums in rank order."""
    return (ProcessGroupTransport if device.type == "cuda" else RankOrderTransport)(group, gather_group)


@functools.cache
def _let_threads_end() -> None:
    """Wait a moment when the process ends.

    A thread of gloo releases a collective's tensors a moment later, and needs the interpreter for it. If the interpreter is ending,
    the process is aborted ("terminate called without an active exception").
    """
    atexit.register(time.sleep, _THREADS_END_S)


def _movable(tensor: Tensor) -> Tensor:
    """Return the tensor, or its bytes if not every backend knows the dtype (of frozen weights)."""
    return tensor if tensor.dtype in SERVED_DTYPES else tensor.view(torch.uint8)


def gather_values(value: _Value, group: ProcessGroup) -> list[_Value]:
    """Return the ranks' values, which must be picklable, in rank order. Ranks: all of the group; blocks the host."""
    values = [value] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def greatest(values: Sequence[float], groups: Sequence[ProcessGroup], device: torch.device) -> list[float]:
    """Return the greatest of the ranks' values, exact up to 2**53; one all-reduce for each axis of the ranks' mesh.

    Ranks: all of the mesh; blocks the host.
    """
    found = torch.tensor(values, dtype=torch.float64, device=device)
    for group in groups:
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return list(found.tolist())


def is_same_on_ranks(text: str, groups: Sequence[ProcessGroup], device: torch.device) -> bool:
    """Return whether all ranks have the same text; the same answer on all of them.

    Args:
        groups: a process group for each axis of the ranks' mesh.
        device: one that the process groups serve.

    Ranks: all of the mesh; blocks the host. One all-reduce of 16 bytes for each axis.
    """
    # Texts are the same if the greatest number is the least one. Six bytes, since larger numbers are rounded on the way.
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6])
    highest, lowest = greatest((number, -number), groups, device)
    return highest == -lowest


def exchange(value: Any, groups: Sequence[ProcessGroup]) -> dict[int, Any]:
    """Return the values of all ranks, by global rank. Ranks: all of the mesh with these axes; blocks the host."""
    values = {dist.get_rank(): value}
    for group in groups:
        values = {rank: theirs for some in gather_values(values, group) for rank, theirs in some.items()}
    return dict(sorted(values.items()))


def compare_on_ranks(
    settings: Mapping[str, Any], groups: Sequence[ProcessGroup], device: torch.device, *, remedy: str = ""
) -> None:
    """Compare values by name between the ranks of a mesh, given by the process group of each axis.

    Raises:
        ValueError: on all ranks, if a value differs; with its name, the values and their ranks.

    Ranks: all of the mesh; blocks the host.
    """
    groups = [group for group in groups if group.size() > 1]
    texts = {name: repr(value) for name, value in settings.items()}
    # Numbers first: values of large models are long, and nearly always the same.
    if not groups or is_same_on_ranks(repr(texts), groups, device):
        return
    found = [
        f"{name} must be the same on all ranks that shard together, got {got}"
        for name, got in _differences(exchange(texts, groups))
    ]
    if len(found) > _MAX_NAMED:
        found[_MAX_NAMED:] = [f"and {len(found) - _MAX_NAMED} more differ"]
    raise ValueError("; ".join([*found, remedy] if remedy else found))


def by_value(values: Mapping[int, str]) -> str:
    """Format the values of ranks, each with its ranks."""
    ranks_of: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks_of.setdefault(value, []).append(rank)
    return " and ".join(f"{value} on ranks {in_ranges(ranks)}" for value, ranks in ranks_of.items())


def _differences(texts: Mapping[int, Mapping[str, str]]) -> Iterator[tuple[str, str]]:
    for name in dict.fromkeys(name for values in texts.values() for name in values):
        of_rank = {rank: values.get(name, "nothing") for rank, values in texts.items()}
        if len(set(of_rank.values())) > 1:
            yield name, by_value(of_rank)
    names = [set(values) for values in texts.values()]
    if all(own == names[0] for own in names) and len({tuple(values) for values in texts.values()}) > 1:
        rest = [name for name in texts[min(texts)] if len({tuple(values).index(name) for values in texts.values()}) > 1]
        got = by_value({rank: ", ".join(name for name in values if name in rest) for rank, values in texts.items()})
        yield "the order of what is compared", got
