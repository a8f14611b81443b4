"""Memory that the ranks of a process group can read from each other, and the barriers that order the reading.

[Note: peer memory] The storage of an allocation carries its ``PeerMemory`` as an attribute, so that the peers' mappings
can be found from any view, whichever transport allocated it. Nothing else refers to it: it is freed with the last view.
So it must not refer to a view of the storage that carries it.

The last view may only die when no other rank reads the memory and no barrier on it is under way. Both hold after a
backward's reductions have finished, and after ``Transport.end_pass``. Peers have mappings of their own, so ranks need
not free at the same time.
"""

from __future__ import annotations

import mmap
import os
import platform
import select
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import ClassVar

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.distributed.fsdp.comm.nvlink import SHARING, Place, cuda_place, problem_among, this_host
from megatron.core.distributed.fsdp.config.torch_versions import all_gather_flat

_ATTRIBUTE = "_fsdp_peer_memory"
PAGE_NBYTES = 2**21
# A wait yields the processor this often, and then sleeps for ever longer, up to a millisecond at a time.
_NUM_YIELDS = 100
_LONGEST_PAUSE_S = 1e-3
_SECONDS_BETWEEN_SIGNS_OF_LIFE = 0.1
# The process's allocations by device, for those who count its memory; nothing is decided by them.
_alive: weakref.WeakKeyDictionary[PeerMemory, tuple[torch.device, int]] = weakref.WeakKeyDictionary()


class Barrier(Enum):
    """What all ranks have done when they reach a barrier, which has a channel of signals of its own.

    On each rank the barriers of one channel and allocation must be issued in order. Streams that run at the same time
    use different channels: gathers the first two, reductions the others.
    """

    PUBLISHED = "published its weights"
    PASS_ENDED = "ended its pass over the weights"
    INPUTS_WRITTEN = "written its reduce-scatter inputs"
    INPUTS_READ = "read the others' reduce-scatter inputs"

    def __init__(self, act: str) -> None:
        self.act, self.channel = act, len(type(self).__members__)


class PeerMemory(ABC):
    """One rank's part of an allocation that all ranks of ``group`` made together, and views of the other parts.

    There is a subclass for each type of device: ``peer_copy.PEER_MEMORY``.
    """

    direct_nbytes: ClassVar[int]
    """A reduction sums pieces up to this size straight out of the peers' memory; larger ones are copied here first."""

    def __init__(self, group: ProcessGroup, start: int) -> None:
        self.group_name: str = group.group_name
        self.rank, self.size = group.rank(), group.size()
        self.ranks: Sequence[int] = dist.get_process_group_ranks(group)
        self.start = start  # address of this rank's first byte
        # The next rank first, so that ranks that copy at the same time copy from different ones.
        self.peers = tuple((self.rank + step) % self.size for step in range(1, self.size))
        self._views: dict[tuple[int, int, torch.dtype], dict[int, Tensor]] = {}

    def views(self, start: int, numel: int, dtype: torch.dtype) -> dict[int, Tensor]:
        """Return {peer: [numel]} views of the peers' memory where this rank has ``dtype`` at the address ``start``.

        The peers come in the order in which to read them. Views are made once and die with the memory.
        """
        found = self._views.get((start, numel, dtype))
        if found is None:
            found = {peer: self._view(peer, start - self.start, numel, dtype) for peer in self.peers}
            self._views[start, numel, dtype] = found
        return found

    @classmethod
    @abstractmethod
    def empty(cls, numel: int, dtype: torch.dtype, device: torch.device, group: ProcessGroup) -> Tensor:
        """Allocate peer memory [numel] for the ranks of ``group``. Ranks: all, with the same arguments; blocks the host."""

    @classmethod
    @abstractmethod
    def problem(cls, group: ProcessGroup, device: torch.device) -> str | None:
        """Say why ranks cannot share memory on ``device``, the same on all; None if they can. Ranks: all; blocks."""

    @abstractmethod
    def barrier(self, which: Barrier) -> None:
        """Make later work here wait for what each rank issued before its own call. Ranks: all.

        On a device the current stream waits, not the host.

        Raises:
            RuntimeError: a rank did not come within the process group's time-out; on a device its work ends instead.
        """

    @abstractmethod
    def _view(self, peer: int, offset_nbytes: int, numel: int, dtype: torch.dtype) -> Tensor: ...


def attach(tensor: Tensor, memory: PeerMemory) -> None:
    """Attach ``memory`` to the tensor's storage, for ``peer_memory_of``; the storage keeps it alive."""
    storage = tensor.untyped_storage()
    setattr(storage, _ATTRIBUTE, memory)
    _alive[memory] = tensor.device, -(-storage.nbytes() // PAGE_NBYTES) * PAGE_NBYTES


def peer_memory_of(tensor: Tensor) -> PeerMemory | None:
    """Return the peer memory that the tensor lies in; None if other ranks cannot read it."""
    return getattr(tensor.untyped_storage(), _ATTRIBUTE, None)


def peer_memory_nbytes(device: torch.device) -> int:
    """Return the bytes of peer memory that this process holds on ``device``, in whole pages of 2 MiB.

    On CUDA the driver allocates it: ``torch.cuda.memory_allocated`` does not count it. Ranks: each its own.
    """
    return sum(nbytes for of_device, nbytes in list(_alive.values()) if of_device == device)


def time_out_of(group: ProcessGroup, device: torch.device) -> timedelta:
    """Return how long the process group's own collectives on ``device`` wait for a rank."""
    time_out: timedelta = group._get_backend(device).options._timeout
    return time_out


class CudaPeerMemory(PeerMemory):
    """Memory that the driver maps for all devices; barriers are kernels of one warp on the current stream.

    A barrier sets a flag in each peer's signal pad and clears those that the peers set in its own, so a captured one
    can be replayed. One that waits for longer than the process group's time-out traps, which ends all work on the
    device.
    """

    # Below this the launches of copies (50 us of the host) cost more than the SMs that wait for NVLink while they sum.
    direct_nbytes = 64 * 2**20

    def __init__(self, tensor: Tensor, group: ProcessGroup) -> None:
        super().__init__(group, tensor.data_ptr())
        self._handle = symm_mem.rendezvous(tensor, group)
        self._time_out_ms = max(1, int(time_out_of(group, tensor.device).total_seconds() * 1000))

    @classmethod
    def empty(cls, numel: int, dtype: torch.dtype, device: torch.device, group: ProcessGroup) -> Tensor:
        """Allocate peer memory, in whole pages of 2 MiB.

        The driver allocates it, not PyTorch's caching allocator: ``torch.cuda.memory_allocated`` does not count it, and
        it is returned to the device at once.
        """
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        tensor = symm_mem.empty(numel, dtype=dtype, device=device)
        attach(tensor, cls(tensor, group))
        return tensor

    @classmethod
    def problem(cls, group: ProcessGroup, device: torch.device) -> str | None:
        # Barriers set flags by atomics in the peers' memory, which need NVLink, or one device that the ranks share: the driver
        # then runs their kernels in turns, also those that wait for each other.
        may_share = os.environ.get(SHARING) == "1"
        return problem_among(cuda_place(device, backend_problem(device), may_share=may_share), group)

    def barrier(self, which: Barrier) -> None:
        self._handle.barrier(which.channel, self._time_out_ms)

    def _view(self, peer: int, offset_nbytes: int, numel: int, dtype: torch.dtype) -> Tensor:
        # The view does not keep the mapping alive; this object keeps both.
        return self._handle.get_buffer(peer, (numel,), dtype, offset_nbytes // dtype.itemsize)


def backend_problem(device: torch.device) -> str | None:
    """Say why PyTorch's symmetric memory cannot be used as it is set up in this process; None if it can."""
    backend = symm_mem.get_backend(device)
    if backend == "CUDA":
        return None
    return (
        f"PyTorch's symmetric memory must have its CUDA backend, got {backend!r}; do not call symm_mem.set_backend, and "
        "leave TORCH_SYMMMEM unset"
    )


@dataclass(frozen=True)
class _Part:
    """One rank's mapped part: ``storage`` is the data, ``flags`` one byte for each barrier and source rank."""

    storage: torch.UntypedStorage
    flags: mmap.mmap


class CpuPeerMemory(PeerMemory):
    """Memory that is mapped into all processes; barriers block the host.

    A rank sets its flag at each peer, and the peer clears it. Flags are single bytes, written after the data, which is
    right on processors that keep stores in order, such as x86.
    """

    # A copy first gains nothing: the cores that compute make it.
    direct_nbytes = 2**63

    def __init__(self, own: _Part, parts: dict[int, _Part], processes: list[int], group: ProcessGroup) -> None:
        super().__init__(group, own.storage.data_ptr())
        self._own_flags = own.flags  # not the storage, which holds this object
        self._parts = parts
        self._processes = processes  # [size] process id of each rank
        self._time_out = time_out_of(group, torch.device("cpu")).total_seconds()

    @classmethod
    def empty(cls, numel: int, dtype: torch.dtype, device: torch.device, group: ProcessGroup) -> Tensor:
        """Allocate peer memory, filled with zeros.

        Raises:
            RuntimeError: on all ranks, if one could not map another's memory.
        """
        nbytes = numel * dtype.itemsize
        file = os.memfd_create("fsdp peer memory", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, _in_pages(nbytes) + _flags_nbytes(group.size()))
            own = _map(file, nbytes, group.size())
            mine = torch.tensor([os.getpid(), file, os.fstat(file).st_ino, nbytes])
            everyone = torch.empty(group.size() * mine.numel(), dtype=mine.dtype)
            all_gather_flat(group, everyone, mine)
            addresses: list[list[int]] = everyone.view(group.size(), -1).tolist()
            parts = _map_peers(addresses, nbytes, group)
        finally:
            os.close(file)
        tensor = _flat(own.storage, 0, numel, dtype)
        attach(tensor, cls(own, parts, [address[0] for address in addresses], group))
        return tensor

    @classmethod
    def problem(cls, group: ProcessGroup, device: torch.device) -> str | None:
        place = Place(this_host(), group.rank(), tuple(range(group.size())), platform_problem())
        problem = problem_among(place, group)
        if problem is None:
            try:  # containers of one host may hide their processes from each other
                cls.empty(1, torch.uint8, device, group)
            except RuntimeError as error:
                return str(error)
        return problem

    def barrier(self, which: Barrier) -> None:
        first = which.channel * self.size
        for peer in self.peers:
            self._toggle(self._parts[peer].flags, first + self.rank, which, peer, was=0)
        for peer in self.peers:
            self._toggle(self._own_flags, first + peer, which, peer, was=1)

    def _toggle(self, flags: mmap.mmap, index: int, which: Barrier, peer: int, *, was: int) -> None:
        """Wait until a flag is ``was``, and write the other value: 1 at a peer, 0 where that peer has set it here."""
        if flags[index] != was:
            self._await(flags, index, which, peer, was)
        flags[index] = 1 - was

    def _await(self, flags: mmap.mmap, index: int, which: Barrier, peer: int, value: int) -> None:
        begin = last_sign = time.monotonic()
        attempts = 0
        while flags[index] != value:
            attempts += 1
            if attempts <= _NUM_YIELDS:
                os.sched_yield()
                continue
            time.sleep(min(_LONGEST_PAUSE_S, 1e-5 * (attempts - _NUM_YIELDS)))
            now = time.monotonic()
            if now - begin > self._time_out:
                raise self._lost(which, peer, f"did not come within the group's time-out of {self._time_out:g} s")
            if now - last_sign > _SECONDS_BETWEEN_SIGNS_OF_LIFE:
                last_sign = now
                if _has_ended(self._processes[peer]) and flags[index] != value:
                    raise self._lost(which, peer, "has ended")

    def _lost(self, which: Barrier, peer: int, what: str) -> RuntimeError:
        """Return the error that says what a rank had to do and why it is not waited for any longer."""
        return RuntimeError(
            f"rank {self.ranks[peer]} must have {which.act} before rank {self.ranks[self.rank]} goes on, and {what}"
        )

    def _view(self, peer: int, offset_nbytes: int, numel: int, dtype: torch.dtype) -> Tensor:
        return _flat(self._parts[peer].storage, offset_nbytes, numel, dtype)


def platform_problem() -> str | None:
    """Say why processes on this machine cannot read each other's memory in this way; None if they can."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"shared memory between CPU ranks needs x86-64, which keeps stores in order, got {platform.machine()!r}"
    if not hasattr(os, "memfd_create"):
        return f"shared memory between CPU ranks needs Linux, got {platform.system()!r}"
    return None


def _map_peers(addresses: list[list[int]], nbytes: int, group: ProcessGroup) -> dict[int, _Part]:
    """Return {peer: part}. A rank that fails tells the others, so that all fail together."""
    parts, problem = {}, ""
    for peer, address in enumerate(addresses):
        if peer == group.rank():
            continue
        try:
            parts[peer] = _map_peer(address, nbytes, group.size())
        except (OSError, RuntimeError) as error:
            problem = str(error)
    succeeded = torch.empty(group.size(), dtype=torch.int64)
    all_gather_flat(group, succeeded, torch.tensor([0 if problem else 1]))
    failed = [rank for rank, success in enumerate(succeeded.tolist()) if not success]
    if failed:
        raise RuntimeError(
            f"every rank must map the memory of all others, and ranks {failed} of the group did not"
            + (f": {problem}" if problem else "")
            + "; ranks must be processes of one user in one container, which ask for the same memory"
        )
    return parts


def _map_peer(address: list[int], nbytes: int, num_ranks: int) -> _Part:
    process, number, inode, peer_nbytes = address
    if peer_nbytes != nbytes:
        raise RuntimeError(f"ranks must ask for the same memory, got {nbytes} and {peer_nbytes} bytes")
    file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(file).st_ino != inode:
            raise RuntimeError(f"process {process} must be that rank's, got another one: it runs in another container")
        return _map(file, nbytes, num_ranks)
    finally:
        os.close(file)


def _map(file: int, nbytes: int, num_ranks: int) -> _Part:
    # The file is open already; torch asks for a path.
    storage = torch.from_file(f"/proc/self/fd/{file}", shared=True, size=nbytes, dtype=torch.uint8).untyped_storage()
    # Flags follow the data, on a page of their own.
    return _Part(storage, mmap.mmap(file, _flags_nbytes(num_ranks), offset=_in_pages(nbytes)))


def _flat(storage: torch.UntypedStorage, offset_nbytes: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(0, dtype=dtype).set_(storage, offset_nbytes // dtype.itemsize, (numel,), (1,))


def _flags_nbytes(num_ranks: int) -> int:
    return _in_pages(len(Barrier) * num_ranks)


def _in_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


def _has_ended(process: int) -> bool:
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)  # readable once the process is over, reaped or not
        return bool(poll.poll(0))
    finally:
        os.close(handle)
