"""Transports by the collectives of a process group: NCCL over any network, and gloo, which sums in rank order."""

from __future__ import annotations

import atexit
import functools
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.distributed.fsdp.comm.transport import Transport, scale_and_accumulate, scaled_in_advance, sum_pieces
from megatron.core.distributed.fsdp.config.mixed_precision import SERVED_DTYPES
from megatron.core.distributed.fsdp.config.torch_versions import all_gather_flat, reduce_scatter_flat

_THREADS_END_S = 0.05


class ProcessGroupTransport(Transport):
    """The process group's own collectives, straight between full buffers and shards.

    Args:
        group: the ranks.
        gather_group: the same ranks for all-gathers; with a communicator of their own they run beside reductions.
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
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values


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

    A thread of gloo lets go of a collective's tensors a moment after it, for which it needs the interpreter; were that ending, the
    process would be aborted ("terminate called without an active exception").
    """
    atexit.register(time.sleep, _THREADS_END_S)


def _movable(tensor: Tensor) -> Tensor:
    """Return the tensor, or its bytes if not every backend knows the dtype (of frozen weights)."""
    return tensor if tensor.dtype in SERVED_DTYPES else tensor.view(torch.uint8)


def begin_exchange(
    group: ProcessGroup,
    received: Tensor,
    sent: Tensor,
    *,
    received_numels: Sequence[int],
    sent_numels: Sequence[int],
) -> Any:
    """Begin to send rank k the k-th piece of ``sent``, and to receive its piece for this rank; return a handle.

    ``handle.wait()`` makes the current stream wait (on the CPU, the host). Until then neither tensor may be touched.

    Args:
        received_numels, sent_numels: [ranks] elements of the pieces, which lie one behind the other.

    Ranks: all of the group, in one order.
    """
    return dist.all_to_all_single(received, sent, list(received_numels), list(sent_numels), group=group, async_op=True)


def gather_parts(part: Tensor, group: ProcessGroup) -> Tensor:
    """Return all ranks' ``part`` [...] as [ranks, ...], in rank order. Ranks: all of the group."""
    parts = torch.empty((group.size(), *part.shape), dtype=part.dtype, device=part.device)
    all_gather_flat(group, parts.view(-1), part.reshape(-1))
    return parts


def sum_over(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Replace ``tensor`` by its sum over the ranks, and return it. Ranks: all of the group."""
    dist.all_reduce(tensor, group=group)
    return tensor
