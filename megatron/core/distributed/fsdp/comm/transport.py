"""The interface of transports, the sums that they have in common, and the transport of one rank alone.

See [Note: transports].
"""

from __future__ import annotations

import functools
import os
from abc import abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum
from itertools import groupby
from traceback import walk_tb
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_MOST_RANGES = 16
# Each number of pieces is a Triton kernel of its own; it adds these dtypes in fp32.
MAX_KERNEL_PIECES = 8
_KERNEL_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))
_IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def unfinished(what: str, axes: Sequence[Transport], error: RuntimeError) -> RuntimeError:
    """Return the error that names a failed or timed-out collective and the ranks that must join it.

    Args:
        what: the collective and what it moves.
        axes: the transports of the mesh axes along which it goes.
        error: what was raised meanwhile.

    Raises:
        RuntimeError: ``error`` itself, if it has nothing to do with the collective, or says that memory is full.
    """
    raise_foreign(error)
    ranks = " and along another axis ".join(in_ranges(axis.ranks) for axis in axes)
    return RuntimeError(
        f"{what} must be joined by all of ranks {ranks}, and did not finish on rank "
        f"{dist.get_rank()}, which waited for the others: {error}. If a rank has stopped, its own log says why; if none "
        "has, or the backend stopped it, ranks run units in different orders (one evaluates alone, leaves out a backward, or runs under "
        "no_grad), or were given other settings (granules, prefetch depths, dtypes); the debug mode, fully_shard_context(debug=True) "
        "around fully_shard, names the first collective that differs"
    )


def in_ranges(ranks: Sequence[int]) -> str:
    """Name ranks in a line, however many there are: ``[0-1023, 1025]``, and ``[0, 8, ... (128 ranks)]`` where few are neighbours."""
    texts = []
    # Neighbours differ from their places in the list by the same number.
    for _, numbered in groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0]):
        run = [rank for _, rank in numbered]
        texts.append(", ".join(map(str, run)) if len(run) < 3 else f"{run[0]}-{run[-1]}")
    if len(texts) > _MOST_RANGES:
        texts = [*texts[: _MOST_RANGES // 2], f"... ({len(ranks)} ranks)", *texts[-_MOST_RANGES // 2 :]]
    return f"[{', '.join(texts)}]"


def raise_foreign(error: RuntimeError) -> None:
    """Raise the error again if it says that memory is full, or has nothing to do with the collective in which it came up.

    A ``DataLoader`` raises from a signal handler when one of its processes has died, wherever the rank is by then.
    """
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    is_foreign = bool(frames) and frames[-1].f_globals.get("__name__", "").startswith("torch.utils.data.")
    if is_foreign or isinstance(error, torch.OutOfMemoryError):
        raise error


class MemoryKind(Enum):
    """What a buffer is for: a transport may need some of them in memory that other ranks can reach."""

    SHARD = "shard"  # a rank's part of the weights: what gathers read
    UNSHARDED = "unsharded"  # whole weights: what gathers write
    REDUCE_SCATTER_INPUT = "reduce-scatter input"  # whole gradients of this rank


class Transport(Protocol):
    """The collectives between the ranks of one mesh axis, on flat buffers. All these ranks must call in one order.

    Calls are issued on the current stream and return without waiting for the device. The defaults here are those of a
    transport whose collectives meet all ranks and move memory of any kind.
    """

    name: str  # "nccl", "symm", "peer_copy", "gloo" or "local"
    size: int
    rank: int
    ranks: Sequence[int]  # global ranks of the axis
    is_symmetric: bool = False  # buffers must lie at equal offsets of what ``empty`` gave on all ranks
    reads_peers: bool = False  # gathers read the other ranks' shards without waiting for these ranks

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device, kind: MemoryKind) -> Tensor:
        """Allocate uninitialised memory [numel] for buffers of ``kind``. It is freed with its last view.

        Buffers may be views of it, at the same offset on all ranks.

        Ranks: all, with the same arguments; may block the host.
        """
        return torch.empty(numel, dtype=dtype, device=device)

    def reserve(self, numel: int, dtype: torch.dtype, device: torch.device, kind: MemoryKind) -> None:
        """Prepare to move buffers [numel] of ``kind`` outside ``empty``'s memory, until ``empty`` allocates that kind.

        Ranks: all, with the same arguments; may block the host.
        """
        return

    def publish(self) -> None:
        """Make later gathers here see what every rank has written to its shards. Ranks: all.

        Call it between a write to shards and the next gather of them.
        """
        return  # a collective starts when all ranks have come to it

    def end_pass(self) -> None:
        """Make later writes to shards here wait until all ranks' gathers so far have read them. Ranks: all.

        Call it after the gathers of a forward without a backward. The reductions of a backward have the same effect.
        """
        return

    def close(self) -> None:
        """Deregister all memory from the process groups, so that these can be destroyed; the transport stays usable.

        Ranks: all, before the next collective; may block the host.
        """
        return

    @abstractmethod
    def all_gather(self, full: Tensor, shard: Tensor) -> None:
        """Fill ``full`` [size * S] with the ranks' ``shard`` [S] in rank order; ``shard`` may lie in ``full``."""

    @abstractmethod
    def reduce_scatter(self, out: Tensor, full: Tensor, *, scale: float = 1.0, accumulate: bool = False) -> None:
        """Write ``scale`` times the sum of the ranks' segments for this rank to ``out`` [S]; ``accumulate``: add it.

        ``full`` [size * S] holds this rank's segments for all ranks; its content is undefined after the call. ``out``
        may have a wider dtype; then the sum is rounded to the dtype of ``full`` at most once, before it is scaled.
        """

    @abstractmethod
    def all_reduce(self, out: Tensor, full: Tensor, *, scale: float = 1.0, accumulate: bool = False) -> None:
        """Do the same with the whole sum: ``out`` [S] and ``full`` [S], which may be the same tensor."""

    @abstractmethod
    def broadcast(self, tensor: Tensor) -> None:
        """Copy ``tensor`` of the axis's first rank to that of all others."""

    @abstractmethod
    def maximum(self, tensor: Tensor) -> None:
        """Replace each element by the largest of the ranks'. Ranks: all, on the stream of gathers."""

    @abstractmethod
    def exchange(self, value: Any) -> list[Any]:
        """Return the ranks' values, which must be picklable, in rank order. Blocks the host."""


def scaled_in_advance(full: Tensor, scale: float) -> float:
    """Multiply fp16 numbers by ``scale`` before a collective adds them in fp16, whose range a sum leaves sooner than a mean.

    Returns:
        The factor that remains for the sum: 1, or ``scale`` where nothing was multiplied.
    """
    if full.dtype is not torch.float16:
        return scale
    if scale != 1.0:
        full.mul_(scale)
    return 1.0


def scale_and_accumulate(out: Tensor, total: Tensor, *, scale: float, accumulate: bool) -> None:
    """Write ``scale`` times ``total`` to ``out``, or add it to ``out``; both may be the same memory."""
    if accumulate:
        out.add_(total, alpha=scale)
        return
    if out.dtype is torch.float16 and total.dtype is not torch.float16:
        out.copy_(total * scale)  # the sum may be out of fp16's range
        return
    if out.data_ptr() != total.data_ptr():
        out.copy_(total)
    if scale != 1.0:
        out.mul_(scale)


def sum_pieces(out: Tensor, pieces: Sequence[Tensor], *, scale: float = 1.0, accumulate: bool = False) -> None:
    """Write ``scale`` times the sum of ``pieces`` [N] of [S] to ``out`` [S], or add it to ``out`` (``accumulate``).

    Pieces are added in fp32 or wider, from the first to the last, so the result is bitwise the same every time. On CUDA
    it is one kernel.
    """
    if len(pieces) == 1 and out.dtype == pieces[0].dtype:
        scale_and_accumulate(out, pieces[0], scale=scale, accumulate=accumulate)
        return
    served = len(pieces) <= MAX_KERNEL_PIECES and out.dtype in _KERNEL_DTYPES and pieces[0].dtype in _KERNEL_DTYPES
    kernel = _kernel() if served and (out.is_cuda or _IS_INTERPRETED) else None
    if kernel is not None:
        kernel(out, pieces, scale, accumulate)
        return
    total = pieces[0].to(torch.promote_types(pieces[0].dtype, torch.float32), copy=True)
    for piece in pieces[1:]:
        total += piece
    scale_and_accumulate(out, total, scale=scale, accumulate=accumulate)


@functools.cache
def _kernel() -> Callable[..., Any] | None:
    """Import the kernel at its first use; None where Triton is not installed."""
    try:
        from megatron.core.distributed.fsdp.comm.sum_kernel import sum_with_triton
    except ImportError:
        return None
    return sum_with_triton


class LocalTransport(Transport):
    """The transport of one rank alone: it copies from one buffer to the other."""

    name = "local"
    size = 1
    rank = 0

    def __init__(self, ranks: Sequence[int] = (0,)) -> None:
        self.ranks = ranks

    def all_gather(self, full: Tensor, shard: Tensor) -> None:
        if full.data_ptr() != shard.data_ptr():
            full.copy_(shard)

    def reduce_scatter(self, out: Tensor, full: Tensor, *, scale: float = 1.0, accumulate: bool = False) -> None:
        scale_and_accumulate(out, full, scale=scale, accumulate=accumulate)

    all_reduce = reduce_scatter

    def broadcast(self, tensor: Tensor) -> None:
        pass

    def maximum(self, tensor: Tensor) -> None:
        pass

    def exchange(self, value: Any) -> list[Any]:
        return [value]
