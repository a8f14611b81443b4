"""Memory that the ranks of a process group can read from each other, and the barriers that order the reading.

[Note: peer memory] The storage of an allocation carries its ``PeerMemory`` as an attribute, so that the peers' mappings
can be found from any view, whichever transport allocated it. Nothing else refers to it: it is freed with the last view.
So it must not refer to a view of the storage that carries it.

The last view may only die when no other rank reads the memory and no barrier on it is under way. Both hold after a
backward's reductions have finished, and after ``Transport.end_pass``. Peers have mappings of their own, so ranks need
not free at the same time.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from enum import Enum
from typing import ClassVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

_ATTRIBUTE = "_fsdp_peer_memory"
PAGE_NBYTES = 2**21
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
        self._views: dict[tuple[int, int, torch.dtype], dict[int, torch.Tensor]] = {}

    def views(self, start: int, numel: int, dtype: torch.dtype) -> dict[int, torch.Tensor]:
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
    def empty(cls, numel: int, dtype: torch.dtype, device: torch.device, group: ProcessGroup) -> torch.Tensor:
        """Allocate peer memory [numel] for the ranks of ``group``. Ranks: all, alike; blocks the host."""

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
    def _view(self, peer: int, offset_nbytes: int, numel: int, dtype: torch.dtype) -> torch.Tensor: ...


def attach(tensor: torch.Tensor, memory: PeerMemory) -> None:
    """Attach ``memory`` to the tensor's storage, for ``peer_memory_of``; the storage keeps it alive."""
    storage = tensor.untyped_storage()
    setattr(storage, _ATTRIBUTE, memory)
    _alive[memory] = tensor.device, -(-storage.nbytes() // PAGE_NBYTES) * PAGE_NBYTES


def peer_memory_of(tensor: torch.Tensor) -> PeerMemory | None:
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
