"""Collectives by copies out of the other ranks' memory. Copy engines make them, which take no SM from the GEMMs."""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.distributed.fsdp.comm.peer_memory import (
    Barrier,
    CpuPeerMemory,
    CudaPeerMemory,
    PeerMemory,
    peer_memory_of,
)
from megatron.core.distributed.fsdp.comm.process_group import ProcessGroupTransport, make_process_group_transport
from megatron.core.distributed.fsdp.comm.transport import MemoryKind, sum_pieces

# The memory that peers can read, by the type of device.
PEER_MEMORY: dict[str, type[PeerMemory]] = {"cuda": CudaPeerMemory, "cpu": CpuPeerMemory}
# Memory for pieces that are copied here before they are summed; a larger reduction takes several rounds.
SCRATCH_NBYTES = 64 * 2**20
# Rounds begin at multiples of this, so that every piece stays aligned for loads of 16 bytes.
_ROUND_NUMEL = 1024
# Attributes of a full buffer, which is the same object in each step: the copies of a gather into it, and the pieces
# that a reduction of it sums. They die with that object, so neither keeps memory that is no longer used.
_COPIES, _PIECES = "_fsdp_copies", "_fsdp_pieces"


@dataclass(frozen=True)
class _Copies:
    """The copies of a gather of ``shard`` into the buffer at ``address``; buffers may get new memory between steps."""

    shard: Tensor
    address: int
    run: Callable[[], None]


@dataclass(frozen=True)
class _Pieces:
    """What a reduction sums: this rank's segment and the same one of the peers, in rank order."""

    memory: PeerMemory
    pieces: list[Tensor]


class PeerCopyTransport(ProcessGroupTransport):
    """Gathers copy the peers' shards; reductions read the peers' reduce-scatter inputs and sum them here.

    A gather needs no handshake, since shards do not change within a step: ``publish`` is the only barrier, and a slow
    rank delays no other rank's gathers. A reduction has a barrier before it (all inputs are written) and one after it
    (all are read). Sums go in rank order in fp32: bitwise those of ``RankOrderTransport``.

    Buffers that are not in peer memory go through the process group, and so do ``all_reduce`` and ``broadcast``. All
    ranks decide the same, since they allocate by the same calls. [Note: peer memory] in peer_memory.py.

    Args:
        group: the ranks, all on one host.
        gather_group: the same ranks, for the all-gathers that go through a process group.
        device: of the buffers.
    """

    name = "peer_copy"
    is_symmetric = True
    reads_peers = True

    def __init__(self, group: ProcessGroup, gather_group: ProcessGroup, device: torch.device) -> None:
        super().__init__(group, gather_group)
        self._by_group = make_process_group_transport(group, gather_group, device)
        self.scratch_nbytes = SCRATCH_NBYTES
        self._memory = PEER_MEMORY[device.type]
        self.direct_nbytes = self._memory.direct_nbytes
        self._device = device
        # The oldest live shards that were made or gathered here: publish and end_pass use the barriers of their memory.
        self._shards: weakref.ref[PeerMemory] | None = None

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device, kind: MemoryKind) -> Tensor:
        if kind is MemoryKind.UNSHARDED or numel == 0:
            return torch.empty(numel, dtype=dtype, device=device)
        tensor = self._memory.empty(numel, dtype, device, self.group)
        if kind is MemoryKind.SHARD:
            self._remember(peer_memory_of(tensor))
        return tensor

    def _remember(self, memory: PeerMemory | None) -> None:
        # Ranks must use the barriers of the same memory. They allocate and gather in one order, so the oldest is the same one.
        if memory is not None and (self._shards is None or self._shards() is None):
            self._shards = weakref.ref(memory)

    def publish(self) -> None:
        self._barrier(Barrier.PUBLISHED)

    def end_pass(self) -> None:
        self._barrier(Barrier.PASS_ENDED)

    def _barrier(self, which: Barrier) -> None:
        memory = None if self._shards is None else self._shards()
        # Another transport made the shards, and none was gathered here yet: the ranks meet in a collective instead.
        if memory is None:
            dist.all_reduce(torch.zeros(1, device=self._device), group=self.gather_group)
            return
        memory.barrier(which)

    def all_gather(self, full: Tensor, shard: Tensor) -> None:
        plan: _Copies | None = getattr(full, _COPIES, None)
        if plan is None or plan.shard is not shard or plan.address != full.data_ptr():
            plan = self._plan_copies(full, shard)
            if plan is None:
                self._by_group.all_gather(full, shard)
                return
        plan.run()

    def _plan_copies(self, full: Tensor, shard: Tensor) -> _Copies | None:
        """Prepare the copies of a gather and attach them to ``full``; None where the process group must gather."""
        memory = self._memory_of(shard)
        start, numel = shard.data_ptr(), shard.numel()
        # A shard that lies in the full buffer was written after the last publish.
        if memory is None or 0 <= start - full.data_ptr() < full.numel() * full.element_size():
            return None
        self._remember(memory)
        # Of full.data: views of full, on which they will hang, would be a cycle of references.
        segments = full.data.view(self.size, numel).unbind()
        pairs = [(segments[peer], view) for peer, view in memory.views(start, numel, shard.dtype).items()]
        plan = _Copies(shard, full.data_ptr(), prepare_copies([*pairs, (segments[self.rank], shard.data)]))
        setattr(full, _COPIES, plan)
        return plan

    def reduce_scatter(self, out: Tensor, full: Tensor, *, scale: float = 1.0, accumulate: bool = False) -> None:
        if full.numel() != self.size * out.numel():
            raise ValueError(f"full must have {self.size} times out's {out.numel()} elements, got {full.numel()}")
        plan: _Pieces | None = getattr(full, _PIECES, None)
        if plan is None:
            memory = self._memory_of(full)
            if memory is None:
                self._by_group.reduce_scatter(out, full, scale=scale, accumulate=accumulate)
                return
            plan = self._find_pieces(full, memory)
        # Without the first barrier a piece could be read before its rank has written it, without the second one be overwritten
        # by its rank's next gradients before it is read.
        plan.memory.barrier(Barrier.INPUTS_WRITTEN)
        if out.numel() * full.element_size() <= self.direct_nbytes:
            sum_pieces(out, plan.pieces, scale=scale, accumulate=accumulate)
        else:
            self._copy_and_sum(out, plan, scale, accumulate)
        plan.memory.barrier(Barrier.INPUTS_READ)

    def all_reduce(self, out: Tensor, full: Tensor, *, scale: float = 1.0, accumulate: bool = False) -> None:
        self._by_group.all_reduce(out, full, scale=scale, accumulate=accumulate)

    def _find_pieces(self, full: Tensor, memory: PeerMemory) -> _Pieces:
        """Find this rank's segment in all ranks' ``full``, and attach these segments to this rank's ``full``."""
        numel = full.numel() // self.size
        own = full.data.narrow(0, self.rank * numel, numel)  # of full.data, as above
        views = memory.views(own.data_ptr(), numel, own.dtype)
        plan = _Pieces(memory, [own if rank == self.rank else views[rank] for rank in range(self.size)])
        setattr(full, _PIECES, plan)
        return plan

    def _copy_and_sum(self, out: Tensor, plan: _Pieces, scale: float, accumulate: bool) -> None:
        own = plan.pieces[self.rank]
        share = self.scratch_nbytes // (own.element_size() * (self.size - 1))
        round_numel = max(_ROUND_NUMEL, share // _ROUND_NUMEL * _ROUND_NUMEL)
        for begin in range(0, own.numel(), round_numel):
            here = slice(begin, begin + round_numel)
            pieces = [piece[here] for piece in plan.pieces]
            # All rounds are on one stream, so the next one gets the same memory.
            scratch = torch.empty((self.size - 1, own[here].numel()), dtype=own.dtype, device=own.device)
            for peer, target in zip(plan.memory.peers, scratch.unbind(), strict=True):
                pieces[peer] = target.copy_(pieces[peer], non_blocking=True)
            sum_pieces(out[here], pieces, scale=scale, accumulate=accumulate)

    def _memory_of(self, tensor: Tensor) -> PeerMemory | None:
        """Return the peer memory that the tensor lies in, if the same process group made it."""
        memory = peer_memory_of(tensor)
        return memory if memory is not None and memory.group_name == self.group.group_name else None


def peer_copy_problem(group: ProcessGroup, device: torch.device) -> str | None:
    """Return why peer copy cannot serve buffers on ``device``, the same on all ranks; None if it can.

    Ranks: all of the process group; blocks the host.
    """
    if group.size() == 1:
        return "peer copy is for two ranks or more, got a group of one"
    if device.type not in PEER_MEMORY:
        return f"peer copy is for {' and '.join(PEER_MEMORY)} devices, got {device.type}"
    return PEER_MEMORY[device.type].problem(group, device)


def prepare_copies(pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], None]:
    """Return a function that makes the copies on the current stream, on GPUs by copy engines, whenever it is called.

    Args:
        pairs: (target, source) of equal size and dtype, contiguous, all mapped on one device. They must keep their
            memory for as long as the function is used.

    The function raises RuntimeError where the driver refuses a copy. Copies can be captured into a CUDA graph.
    Source: the CUDA driver's reference, cuMemcpyDtoDAsync.
    """
    for target, source in pairs:
        if target.numel() != source.numel() or target.dtype != source.dtype:
            raise ValueError(
                f"a copy needs equal sizes, got {source.numel()} {source.dtype} for {target.numel()} {target.dtype}"
            )
    if not pairs or not pairs[0][0].is_cuda:
        return functools.partial(_copy_by_torch, list(pairs))
    addresses = [(t.data_ptr(), s.data_ptr(), t.numel() * t.element_size()) for t, s in pairs]
    return functools.partial(_copy_by_driver, _driver_copy(), addresses, pairs[0][0].device.index)


def _copy_by_torch(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for target, source in pairs:
        target.copy_(source, True)


def _copy_by_driver(copy: Callable[..., int], addresses: list[tuple[int, int, int]], device_index: int) -> None:
    # Asked each time: a captured gather runs on the stream that is captured.
    stream = torch._C._cuda_getCurrentRawStream(device_index)
    for target, source, nbytes in addresses:
        status = copy(target, source, nbytes, stream)
        if status != 0:
            raise RuntimeError(f"the CUDA driver must copy {nbytes} bytes from peer memory, got its error {status}")


@functools.cache
def _driver_copy() -> Callable[..., int]:
    copy = ctypes.CDLL("libcuda.so.1").cuMemcpyDtoDAsync_v2
    copy.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
    copy.restype = ctypes.c_int
    return copy
