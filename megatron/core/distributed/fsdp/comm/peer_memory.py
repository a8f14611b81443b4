"""Memory that the ranks of a process group can read from each other, the barriers that order the reading, and which ranks can.

[Note: peer memory] The storage of an allocation carries its ``PeerMemory`` as an attribute, so that the peers' mappings
can be found from any view, whichever transport allocated it. Nothing else refers to it: it is freed with the last view.
So it must not refer to a view of the storage that carries it.

The last view may only die when no other rank reads the memory and no barrier on it is under way. Both hold after a
backward's reductions have finished, and after ``Transport.end_pass``. Peers have mappings of their own, so ranks need
not free at the same time.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.distributed.fsdp.comm.process_group import gather_values

_ATTRIBUTE = "_fsdp_peer_memory"
PAGE_NBYTES = 2**21
# A wait yields the processor this often, and then sleeps for ever longer, up to a millisecond at a time. After each further
# number of attempts, about 0.1 s, it looks whether the other rank's process is still there.
_NUM_YIELDS = _ATTEMPTS_BETWEEN_SIGNS_OF_LIFE = 100
_LONGEST_PAUSE_S = 1e-3
# Flags have a cache line to themselves: ranks poll them while others still write data.
_CACHE_LINE_NBYTES = 64
# CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED of the driver's API: true over NVLink, false over PCIe.
_NATIVE_ATOMICS = 3
# PyTorch's switch for symmetric memory between ranks that share a device. It is off by default: such ranks are nearly always
# a launcher's mistake.
SHARING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
# This process's allocations, for ``peer_memory_nbytes`` only.
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

    def __init__(self, tensor: Tensor, group: ProcessGroup) -> None:
        self.group_name: str = group.group_name
        self.rank, self.size = group.rank(), group.size()
        self.ranks: Sequence[int] = dist.get_process_group_ranks(group)
        self.start = tensor.data_ptr()  # not the tensor: its storage keeps this object alive. See [Note: peer memory].
        storage = tensor.untyped_storage()
        setattr(storage, _ATTRIBUTE, self)
        _alive[self] = tensor.device, -(-storage.nbytes() // PAGE_NBYTES) * PAGE_NBYTES
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
        """Return why ranks cannot share memory on ``device``, the same on all; None if they can. Ranks: all; blocks."""

    @abstractmethod
    def barrier(self, which: Barrier) -> None:
        """Make later work here wait for what each rank issued before its own call. Ranks: all.

        On a device the current stream waits, not the host.

        Raises:
            RuntimeError: a rank did not come within the process group's time-out; on a device its work ends instead.
        """

    @abstractmethod
    def _view(self, peer: int, offset_nbytes: int, numel: int, dtype: torch.dtype) -> Tensor: ...


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
        super().__init__(tensor, group)
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
        cls(tensor, group)  # which attaches itself to the tensor's storage
        return tensor

    @classmethod
    def problem(cls, group: ProcessGroup, device: torch.device) -> str | None:
        backend, problem = symm_mem.get_backend(device), None
        if backend != "CUDA":
            problem = (
                f"PyTorch's symmetric memory must have its CUDA backend, got {backend!r}; do not call symm_mem.set_backend, "
                "and leave TORCH_SYMMMEM unset"
            )
        # Barriers set flags by atomics in the peers' memory, which need NVLink, or one device that the ranks share: the driver
        # then runs their kernels in turns, also those that wait for each other.
        return problem_among(cuda_place(device, problem, may_share=os.environ.get(SHARING) == "1"), group)

    def barrier(self, which: Barrier) -> None:
        self._handle.barrier(which.channel, self._time_out_ms)

    def _view(self, peer: int, offset_nbytes: int, numel: int, dtype: torch.dtype) -> Tensor:
        # The view does not keep the mapping alive; this object keeps both.
        return self._handle.get_buffer(peer, (numel,), dtype, offset_nbytes // dtype.itemsize)


class CpuPeerMemory(PeerMemory):
    """Memory that is mapped into all processes; barriers block the host.

    A rank sets its flag at each peer, and the peer clears it. Flags are single bytes, written after the data, which is
    right on processors that keep stores in order, such as x86.
    """

    # A copy first gains nothing: the cores that compute make it.
    direct_nbytes = 2**63

    def __init__(self, tensor: Tensor, group: ProcessGroup, maps: list[mmap.mmap], processes: list[int]) -> None:
        super().__init__(tensor, group)
        self._maps = maps  # [size] each rank's data, followed by one flag for each barrier and source rank
        self._flags_at = len(maps[self.rank]) - _flags_nbytes(group)
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
        # Peers open the file by its number in this process, so it stays open until all have reported that they mapped it.
        try:
            os.ftruncate(file, -(-nbytes // _CACHE_LINE_NBYTES) * _CACHE_LINE_NBYTES + _flags_nbytes(group))
            addresses = gather_values((os.getpid(), file, os.fstat(file).st_ino, nbytes), group)
            maps = _map_all(addresses, group)
        finally:
            os.close(file)
        tensor = torch.frombuffer(maps[group.rank()], dtype=dtype, count=numel)
        cls(tensor, group, maps, [process for process, *_ in addresses])
        return tensor

    @classmethod
    def problem(cls, group: ProcessGroup, device: torch.device) -> str | None:
        system, machine, problem = platform.system(), platform.machine(), None
        if not hasattr(os, "memfd_create") or machine not in ("x86_64", "AMD64"):
            problem = (
                "shared memory between CPU ranks needs Linux on x86-64, which keeps stores in order, got "
                f"{system!r} on {machine!r}"
            )
        problem = problem_among(Place(this_host(), group.rank(), tuple(range(group.size())), problem), group)
        if problem is None:
            try:  # containers of one host may hide their processes from each other
                cls.empty(1, torch.uint8, device, group)
            except RuntimeError as error:
                return str(error)
        return problem

    def barrier(self, which: Barrier) -> None:
        first = self._flags_at + which.channel * self.size
        for peer in self.peers:
            self._toggle(self._maps[peer], first + self.rank, which, peer, was=0)
        for peer in self.peers:
            self._toggle(self._maps[self.rank], first + peer, which, peer, was=1)

    def _toggle(self, flags: mmap.mmap, index: int, which: Barrier, peer: int, *, was: int) -> None:
        """Wait until a flag is ``was``, and write the other value: 1 at a peer, 0 where that peer has set it here."""
        end, attempts = time.monotonic() + self._time_out, 0
        while flags[index] != was:
            attempts += 1
            if attempts <= _NUM_YIELDS:
                os.sched_yield()
                continue
            time.sleep(min(_LONGEST_PAUSE_S, 1e-5 * (attempts - _NUM_YIELDS)))
            is_late = time.monotonic() > end
            has_ended = attempts % _ATTEMPTS_BETWEEN_SIGNS_OF_LIFE == 0 and _has_ended(self._processes[peer])
            # The peer may have set the flag just before it ended, so the flag is looked at last.
            if is_late or (has_ended and flags[index] != was):
                reason = f"did not come within the group's time-out of {self._time_out:g} s" if is_late else "has ended"
                raise RuntimeError(
                    f"rank {self.ranks[peer]} must have {which.act} before rank {self.ranks[self.rank]} goes on, and {reason}"
                )
        flags[index] = 1 - was

    def _view(self, peer: int, offset_nbytes: int, numel: int, dtype: torch.dtype) -> Tensor:
        part = torch.frombuffer(self._maps[peer], dtype=torch.uint8)
        return part[offset_nbytes : offset_nbytes + numel * dtype.itemsize].view(dtype)


def _map_all(addresses: list[tuple[int, int, int, int]], group: ProcessGroup) -> list[mmap.mmap]:
    """Return the ranks' parts in rank order. A rank that fails reports it to the others, so that all fail together.

    Args:
        addresses: (process id, number of its open file, inode of the file, bytes) of each rank.
    """
    maps, problem = [], ""
    for address in addresses:
        try:
            maps.append(_map(*address, addresses[group.rank()][3]))
        except (OSError, RuntimeError) as error:
            problem = str(error)
    problems = gather_values(problem, group)
    failed = [rank for rank, theirs in enumerate(problems) if theirs]
    if failed:
        raise RuntimeError(
            f"every rank must map the memory of all others, and ranks {failed} of the group did not: "
            f"{problem or problems[failed[0]]}; ranks must be processes of one user in one container, which ask for the "
            "same memory"
        )
    return maps


def _map(process: int, number: int, inode: int, peer_nbytes: int, nbytes: int) -> mmap.mmap:
    if peer_nbytes != nbytes:
        raise RuntimeError(f"ranks must ask for the same memory, got {nbytes} and {peer_nbytes} bytes")
    file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    try:
        # In another container this number may be a different process, and its file a different one.
        if os.fstat(file).st_ino != inode:
            raise RuntimeError(f"process {process} must be that rank's, got another one: it runs in another container")
        return mmap.mmap(file, 0)
    finally:
        os.close(file)


def _flags_nbytes(group: ProcessGroup) -> int:
    return len(Barrier) * group.size()


def _has_ended(process: int) -> bool:
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return True
    # The state follows the name, which may hold anything. Z: it has ended, and its parent has not asked how; X: it is going.
    return status.rpartition(")")[2].split()[0] in "ZX"


@dataclass(frozen=True)
class Place:
    """The place of a rank: its host, its device there, the devices that NVLink connects to it, and a problem.

    ``shared_as`` is the UUID of the device where other ranks may use the same one, and empty where they may not.
    """

    host: str
    device: int
    linked: tuple[int, ...]
    problem: str | None = None
    shared_as: str = ""


def problem_among(own: Place, group: ProcessGroup) -> str | None:
    """Return why the ranks of a process group cannot reach each other's memory, the same on all ranks; None if they can.

    Args:
        own: the place of this rank.

    Ranks: all of the process group; blocks the host.
    """
    return problem_between(gather_values(own, group))


def problem_between(places: Sequence[Place]) -> str | None:
    """Return why ranks at these places cannot reach each other's memory; None if they can."""
    for place in places:
        if place.problem is not None:
            return place.problem
    hosts = sorted({place.host for place in places})
    if len(hosts) > 1:
        return f"all ranks must be on one host, in one NVLink domain, got {len(hosts)} hosts: {', '.join(hosts)}"
    devices = [place.device for place in places]
    # Ranks with equal indices share a device, or each sees only its own: the UUIDs tell these cases apart.
    names = {(place.device, place.shared_as or rank) for rank, place in enumerate(places)}
    if len(names) > len(set(devices)):
        return (
            f"each rank must have a device of its own and see the others', got devices {devices}; ranks may share one for "
            f"peer copy only, with {SHARING}=1"
        )
    for place in places:
        for other in devices:
            if other != place.device and other not in place.linked:
                return f"NVLink must connect all ranks' devices, got none between devices {place.device} and {other}"
    return None


def cuda_place(device: torch.device, problem: str | None, *, may_share: bool = False) -> Place:
    """Return this rank's place, with the problem that it reports to the others.

    Args:
        may_share: other ranks may use this rank's device.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    shared_as = str(torch.cuda.get_device_properties(index).uuid) if may_share else ""
    linked = tuple(
        other
        for other in range(torch.cuda.device_count())
        if other != index and torch.cuda.can_device_access_peer(index, other) and _has_native_atomics(index, other)
    )
    return Place(this_host(), index, linked, problem, shared_as)


def _has_native_atomics(index: int, other: int) -> bool:
    """Return whether one device's atomics work in the other's memory, which is true over NVLink only."""
    # Not NVML, which some containers lack, and which ignores CUDA_VISIBLE_DEVICES. PyTorch has initialized this library.
    driver = ctypes.CDLL("libcuda.so.1")
    source, target, value = (ctypes.c_int() for _ in range(3))
    statuses = (
        driver.cuDeviceGet(ctypes.byref(source), index),
        driver.cuDeviceGet(ctypes.byref(target), other),
        driver.cuDeviceGetP2PAttribute(ctypes.byref(value), _NATIVE_ATOMICS, source, target),
    )
    return not any(statuses) and value.value == 1


def this_host() -> str:
    """Return a name of this host that no other host or container of another host has."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()} {boot.read_text()[:8] if boot.exists() else ''}".strip()
