"""Memory that the ranks of a group can read from each other, and the barriers that order the reading.

[Note: peer memory] An allocation carries its ``PeerMemory`` on its storage, so that every view of it, whoever made it and
whichever transport allocated it, leads to the peers' mappings. Nothing else holds it: it goes when the last view goes.
For the same reason it holds no view of the storage that it hangs on.

What must hold when the last view goes: no other rank still reads, and no barrier on it is under way. Both are so at rest:
after a backward's reductions have finished, or after ``Transport.end_pass``. Peers keep their own mappings, so one rank may be
earlier than another.
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

from megatron.core.distributed.fsdp.comm.nvlink import Place, problem_among

_ATTRIBUTE = "_fsdp_peer_memory"


class Meeting(Enum):
    """What the ranks have done when all of them have come to a barrier. The value is its channel of signals.

    Calls on one channel of one allocation must be in order on each rank: publishing belongs to the stream of gathers,
    reductions to another that runs at the same time.
    """

    PUBLISHED = 0  # written their shards
    PASS_ENDED = 1  # read the others' shards
    STAGED = 2  # written their summands
    PULLED = 3  # read the others' summands


class PeerMemory(ABC):
    """This rank's part of an allocation that every rank of ``group`` has made, and the way to the other parts.

    There is a subclass for each type of device: ``peer_copy.PEER_MEMORY``. ``reference`` is a weak reference to the object.
    """

    direct_nbytes: ClassVar[int]
    """A reduction sums pieces up to this size straight out of the peers' memory; larger ones are copied here first."""

    def __init__(self, group: ProcessGroup, start: int) -> None:
        self.group_name: str = group.group_name
        self.rank, self.size = group.rank(), group.size()
        self.ranks: Sequence[int] = dist.get_process_group_ranks(group)
        self.start = start  # address of this rank's first byte
        self.reference = weakref.ref(self)
        # The next rank first, so that ranks that pull at the same time pull from different ones.
        self.peers = tuple((self.rank + step) % self.size for step in range(1, self.size))
        self._views: dict[tuple[int, int, torch.dtype], dict[int, torch.Tensor]] = {}

    def views(self, start: int, numel: int, dtype: torch.dtype) -> dict[int, torch.Tensor]:
        """{peer: [numel]} what the other ranks have where this rank has [numel] of ``dtype`` at the address ``start``.

        The peers come in the order in which they are to be read. Views are made once and die with the memory.
        """
        found = self._views.get((start, numel, dtype))
        if found is None:
            found = {peer: self._view(peer, start - self.start, numel, dtype) for peer in self.peers}
            self._views[start, numel, dtype] = found
        return found

    @classmethod
    @abstractmethod
    def empty(cls, numel: int, dtype: torch.dtype, device: torch.device, group: ProcessGroup) -> torch.Tensor:
        """Allocate peer memory [numel] for the ranks of ``group``. Ranks: all, with the same arguments; blocks the host."""

    @classmethod
    @abstractmethod
    def place(cls, group: ProcessGroup, device: torch.device) -> Place:
        """Return where this rank is, with what keeps it from sharing memory."""

    @classmethod
    def problem(cls, group: ProcessGroup, device: torch.device) -> str | None:
        """Say why the ranks cannot share memory on ``device``, the same on all; None if they can. Ranks: all; blocks."""
        return problem_among(cls.place(group, device), group)

    @abstractmethod
    def barrier(self, meeting: Meeting) -> None:
        """Afterwards work issued here runs after what each rank issued before its own call.

        On a device the current stream waits, not the host. Ranks: all.

        Raises:
            RuntimeError: a rank did not come within the group's time-out (on a device that ends its work instead).
        """

    @abstractmethod
    def _view(self, peer: int, offset_nbytes: int, numel: int, dtype: torch.dtype) -> torch.Tensor: ...


def attach(tensor: torch.Tensor, memory: PeerMemory) -> None:
    """Afterwards ``peer_memory_of`` finds ``memory`` from any view of the tensor's storage, which keeps it."""
    setattr(tensor.untyped_storage(), _ATTRIBUTE, memory)


def peer_memory_of(tensor: torch.Tensor) -> PeerMemory | None:
    """The peer memory that the tensor lies in; None if other ranks cannot read it."""
    return getattr(tensor.untyped_storage(), _ATTRIBUTE, None)


def time_out_of(group: ProcessGroup, device: torch.device) -> timedelta:
    """How long the group's own collectives on ``device`` wait for a rank."""
    time_out: timedelta = group._get_backend(device).options._timeout
    return time_out
