"""The only code that moves bytes between ranks: one class per transport, one interface for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core.distributed.fsdp.mixed_precision import SERVED_DTYPES
from megatron.core.distributed.fsdp.torch_versions import all_gather_single, reduce_scatter_single


def unfinished(what: str, axes: Sequence[Transport], error: RuntimeError) -> RuntimeError:
    """The error that says what this rank was doing and whom it waited for, when a collective has failed or timed out."""
    ranks = [list(axis.ranks) for axis in axes]
    return RuntimeError(
        f"{what} must be joined by all of ranks {ranks[0] if len(ranks) == 1 else ranks}, and did not finish on rank "
        f"{dist.get_rank()}, which waited for the others: {error}. If a rank has stopped, its own log says why; if none "
        "has, ranks run units in different orders"
    )


class Transport(Protocol):
    """Moves flat buffers along one mesh axis. Every rank of the axis must call, in the same order.

    Calls are issued on the current stream and return without waiting for the device.
    """

    size: int
    rank: int
    ranks: Sequence[int]  # of the whole run
    widens: bool  # reduce_scatter and all_reduce may write their sum in a wider dtype than that of the pieces

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> None:
        """Afterwards ``full`` [size * S] holds the ranks' ``shard`` [S] in rank order; ``shard`` may lie in ``full``."""

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor) -> None:
        """Afterwards ``shard`` [S] holds this rank's segment of the sum of all ranks' ``full`` [size * S]."""

    def all_reduce(self, out: torch.Tensor, full: torch.Tensor) -> None:
        """Afterwards ``out`` [size * S] holds the sum of all ranks' ``full`` [size * S]; both may be the same."""

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Afterwards ``tensor`` holds what it held on the axis's first rank."""


class LocalTransport:
    """One rank alone: nothing to move but from one buffer to the other."""

    size = 1
    rank = 0
    widens = True

    def __init__(self, ranks: Sequence[int] = (0,)) -> None:
        self.ranks: Sequence[int] = ranks

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> None:
        if full.data_ptr() != shard.data_ptr():
            full.copy_(shard)

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor) -> None:
        if full.data_ptr() != shard.data_ptr():
            shard.copy_(full)

    def all_reduce(self, out: torch.Tensor, full: torch.Tensor) -> None:
        self.reduce_scatter(out, full)

    def broadcast(self, tensor: torch.Tensor) -> None:
        pass


class ProcessGroupTransport:
    """The group's own collectives, straight between arena and shard; for NCCL over any network.

    ``gather_group`` holds the same ranks; where it is another communicator, gathers run beside reductions.
    """

    widens = False

    def __init__(self, group: ProcessGroup, gather_group: ProcessGroup) -> None:
        self.group = group
        self.gather_group = gather_group
        self.size = group.size()
        self.rank = group.rank()
        self.ranks: Sequence[int] = dist.get_process_group_ranks(group)

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> None:
        all_gather_single(_movable(full), _movable(shard), group=self.gather_group)

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor) -> None:
        # SUM, never AVG: symmetric-memory kernels are chosen for SUM alone, and the scale is applied in fp32 later.
        reduce_scatter_single(shard, full, op=dist.ReduceOp.SUM, group=self.group)

    def all_reduce(self, out: torch.Tensor, full: torch.Tensor) -> None:
        if out.data_ptr() != full.data_ptr():
            out.copy_(full)
        dist.all_reduce(out, op=dist.ReduceOp.SUM, group=self.group)

    def broadcast(self, tensor: torch.Tensor) -> None:
        dist.broadcast(_movable(tensor), src=dist.get_global_rank(self.group, 0), group=self.group)


class RankOrderTransport(ProcessGroupTransport):
    """Sums in rank order: pieces travel as they are and are added on the rank that owns them, in fp32 or wider.

    The sum of a gradient does not depend on the strategy (scattered or not), on the number of buffers, or on
    the library's ring, so strategies can be compared bit for bit. It is the transport of gloo groups; the cost
    is one copy of the full buffer. [Note: fixed order of reduction] in DESIGN.md.
    """

    widens = True

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor) -> None:
        pieces = torch.empty_like(full)
        dist.all_to_all_single(pieces, full, group=self.group)
        shard.copy_(_sum_in_order(pieces.view(self.size, -1)))

    def all_reduce(self, out: torch.Tensor, full: torch.Tensor) -> None:
        padded = torch.nn.functional.pad(full, (0, -full.numel() % self.size))
        shard = torch.empty(padded.numel() // self.size, dtype=out.dtype, device=out.device)
        self.reduce_scatter(shard, padded)
        total = torch.empty_like(padded, dtype=out.dtype)
        all_gather_single(total, shard, group=self.group)
        out.copy_(total[: out.numel()])


def _movable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or its bytes where it has a dtype (of frozen weights) that not every backend knows."""
    return tensor if tensor.dtype in SERVED_DTYPES else tensor.view(torch.uint8)


def _sum_in_order(pieces: torch.Tensor) -> torch.Tensor:
    """[S] sum of ``pieces`` [R, S], from rank 0 upwards."""
    total = pieces[0].to(torch.promote_types(pieces.dtype, torch.float32), copy=True)
    for piece in pieces[1:]:
        total += piece
    return total


def make_transport(group: ProcessGroup, gather_group: ProcessGroup, device: torch.device) -> Transport:
    """The transport for buffers on ``device`` between the ranks of ``group``.

    Raises:
        ValueError: the group's backend does not serve the device.
    """
    if group.size() == 1:
        return LocalTransport(dist.get_process_group_ranks(group))
    if device.type == "cuda":
        backend = str(dist.get_backend_config(group))  # such as "cpu:gloo,cuda:nccl"
        if "nccl" not in backend:
            raise ValueError(
                f"a group for CUDA tensors must have the nccl backend, got {backend!r}; pass a mesh on 'cuda'"
            )
        return ProcessGroupTransport(group, gather_group)
    return RankOrderTransport(group, gather_group)
