"""What every transport does, and the one that needs no other rank."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Protocol

import torch
import torch.distributed as dist


def unfinished(what: str, axes: Sequence[Transport], error: RuntimeError) -> RuntimeError:
    """The error that says what this rank was doing and whom it waited for, when a collective has failed or timed out."""
    ranks = [list(axis.ranks) for axis in axes]
    return RuntimeError(
        f"{what} must be joined by all of ranks {ranks[0] if len(ranks) == 1 else ranks}, and did not finish on rank "
        f"{dist.get_rank()}, which waited for the others: {error}. If a rank has stopped, its own log says why; if none "
        "has, ranks run units in different orders"
    )


class MemoryKind(Enum):
    """What a buffer is for: a transport may need some of them in memory that other ranks can reach."""

    SHARD = "shard"  # a rank's part of the weights: what gathers read
    UNSHARDED = "unsharded"  # whole weights: what gathers write
    REDUCE_SCATTER_INPUT = "reduce-scatter input"  # whole gradients of this rank


class Transport(Protocol):
    """Moves flat buffers along one mesh axis. Every rank of the axis must call, in the same order.

    Calls are issued on the current stream and return without waiting for the device.
    """

    name: str  # which transport this is: "nccl", "symm", "peer_copy", "gloo" or "local"
    size: int
    rank: int
    ranks: Sequence[int]  # of the whole run
    is_symmetric: bool  # buffers lie at equal offsets of what ``empty`` gave on all ranks
    reads_peers: bool  # gathers read other ranks' shards where they rest, without asking

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device, kind: MemoryKind) -> torch.Tensor:
        """Uninitialised memory [numel] for buffers of ``kind``. Ranks: all, with the same arguments; may block the host.

        Buffers may be views of it, at the same offset on all ranks. It is given back when the last view is gone.
        """

    def publish(self) -> None:
        """Afterwards gathers issued here see what every rank wrote to its shards before it published.

        To be called between a write to shards and the next gather of them.
        """

    def end_pass(self) -> None:
        """Afterwards work issued here may write to this rank's shards: gathers that any rank issued before have read them.

        To be called after the gathers of a forward that no backward follows. A backward's reductions say as much.
        """

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> None:
        """Afterwards ``full`` [size * S] holds the ranks' ``shard`` [S] in rank order; ``shard`` may lie in ``full``."""

    def reduce_scatter(
        self, out: torch.Tensor, full: torch.Tensor, *, scale: float = 1.0, accumulate: bool = False
    ) -> None:
        """Afterwards ``out`` [S] holds, or (``accumulate``) has grown by, ``scale`` times the sum of this rank's segments.

        ``full`` [size * S] is each rank's summand; what it holds afterwards is undefined. ``out`` may have a wider
        dtype; then the sum is rounded to the dtype of ``full`` at most once, before it is scaled.
        """

    def all_reduce(
        self, out: torch.Tensor, full: torch.Tensor, *, scale: float = 1.0, accumulate: bool = False
    ) -> None:
        """As ``reduce_scatter``, with the whole sum: ``out`` [S] and ``full`` [S], which may be the same."""

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Afterwards ``tensor`` holds what it held on the axis's first rank."""

    def exchange(self, value: Any) -> list[Any]:
        """The ranks' values, which must be picklable, in rank order. Blocks the host."""


def scale_and_accumulate(out: torch.Tensor, total: torch.Tensor, *, scale: float, accumulate: bool) -> None:
    """Afterwards ``out`` holds, or has grown by, ``scale`` times ``total``; both may be the same memory."""
    if accumulate:
        out.add_(total, alpha=scale)
        return
    if out.data_ptr() != total.data_ptr():
        out.copy_(total)
    if scale != 1.0:
        out.mul_(scale)


class LocalTransport:
    """One rank alone: nothing to move but from one buffer to the other."""

    name = "local"
    size = 1
    rank = 0
    is_symmetric = False
    reads_peers = False

    def __init__(self, ranks: Sequence[int] = (0,)) -> None:
        self.ranks: Sequence[int] = ranks

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device, kind: MemoryKind) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def publish(self) -> None:
        pass

    def end_pass(self) -> None:
        pass

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> None:
        if full.data_ptr() != shard.data_ptr():
            full.copy_(shard)

    def reduce_scatter(
        self, out: torch.Tensor, full: torch.Tensor, *, scale: float = 1.0, accumulate: bool = False
    ) -> None:
        scale_and_accumulate(out, full, scale=scale, accumulate=accumulate)

    all_reduce = reduce_scatter

    def broadcast(self, tensor: torch.Tensor) -> None:
        pass

    def exchange(self, value: Any) -> list[Any]:
        return [value]
