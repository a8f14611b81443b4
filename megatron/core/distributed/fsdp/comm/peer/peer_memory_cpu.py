"""Peer memory between processes of one host: files without a name (memfd) that every rank maps.

Barriers follow the protocol of CUDA's signal pads, so that tests without GPUs go through the same states. A killed
process leaves nothing behind: files are opened through /proc and live as long as a process maps them.
"""

from __future__ import annotations

import mmap
import os
import platform
import select
import time
from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup

from megatron.core.distributed.fsdp.comm.nvlink import Place, problem_among, this_host
from megatron.core.distributed.fsdp.comm.peer.peer_memory import Barrier, PeerMemory, attach, time_out_of
from megatron.core.distributed.fsdp.config.torch_versions import all_gather_flat

# A wait yields the processor this often, and then sleeps for ever longer, up to a millisecond at a time.
_NUM_YIELDS = 100
_LONGEST_PAUSE_S = 1e-3
_SECONDS_BETWEEN_SIGNS_OF_LIFE = 0.1


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
    def empty(cls, numel: int, dtype: torch.dtype, device: torch.device, group: ProcessGroup) -> torch.Tensor:
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

    def _view(self, peer: int, offset_nbytes: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
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


def _flat(storage: torch.UntypedStorage, offset_nbytes: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
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
