"""The state of a group's full weight: where it is, who needs it, and which writes have reached it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from operator import attrgetter
from typing import Any

VERSION = attrgetter("_version")

# The version counter of resharded weights, and the bits of the content's number in those of unsharded ones.
# Unsharded weights have a version of 1 or more. Counters have 32 bits, and writes in place add to them.
RESHARDED, FENCE_BITS = 0, (1 << 30) - 1


class WeightState(Enum):
    """Where the full weight is. SHARDED -> GATHERING -> WHOLE -> SHARDED; weights that rest whole are never SHARDED.

    In GATHERING the all-gather (or the sync) is issued, and compute has not waited for it.
    """

    SHARDED = "sharded"
    GATHERING = "gathering"
    WHOLE = "whole"


class Holders:
    """Who needs the full weight now. While somebody does, it is not resharded.

    Attributes:
        forwards, backwards: units whose forward, or backward, uses it.
        by_user: the user called ``unshard``.
        by_plan: the plan keeps it between forward and backward; it is resharded at the end of the backward all the same.
    """

    def __init__(self) -> None:
        self.forwards = self.backwards = 0
        self.by_user = self.by_plan = False

    @property
    def is_used(self) -> bool:
        """True if a pass or the user needs the full weight."""
        return bool(self.forwards or self.backwards or self.by_user)

    def enter_forward(self) -> None:
        """Hold the full weight for a unit's forward."""
        self.forwards += 1

    def leave_forward(self) -> bool:
        """End one ``enter_forward``; return True if nobody needs the full weight any more."""
        self.forwards -= 1  # each unit comes here in each step: ``is_used`` would be another call
        return not (self.forwards or self.backwards or self.by_user)

    def enter_backward(self) -> None:
        """Hold the full weight for a unit's backward."""
        self.backwards += 1

    def leave_backward(self) -> bool:
        """As ``leave_forward``, for a backward."""
        self.backwards -= 1
        return not (self.forwards or self.backwards or self.by_user)

    def drop_passes(self) -> None:
        """End what all forwards and backwards hold: they failed."""
        self.forwards = self.backwards = 0

    def hold_for_user(self, value: bool) -> None:
        """Hold the full weight for the user, or no longer."""
        self.by_user = value

    def keep_for_plan(self, value: bool) -> None:
        """Keep the full weight between forward and backward, or no longer."""
        self.by_plan = value


class Freshness:
    """Which writes to the main weight have reached the model weight and the full weight.

    A cast belongs to a weight version, which is the same on all ranks. Writes are counted by autograd's version counters, which are
    this rank's alone: no collective may depend on them. See [Note: version fence].

    Attributes:
        version: weight version of the latest cast from main to model weight; -1 where the next forward must cast.
        updated_count: ``write_count`` as an optimizer left it that wrote the model weight too.
        num_updates: how often an optimizer wrote the model weight too, or a load the main weight, which no counter sees.
        num_loads: how often a load did.
        followed: ``content`` when the full weight was last brought up to date.
        written_version: the weight version that first had this content.
    """

    def __init__(self) -> None:
        self.tensors: list[Any] = []
        self.version = self._cast_count = self.updated_count = -1
        self.num_updates = self.num_loads = self.followed = self.written_version = 0
        self._counts_casts = False

    def count_writes_to(self, tensors: Sequence[Any]) -> None:
        """Count in-place writes to these tensors, or whatever counts writes to the main weight as ``_version``."""
        self.tensors = list(tensors)

    def count_casts(self, value: bool) -> None:
        """Let the content change with casts of the main weight, not with each write: the full weight is not in its memory."""
        self._counts_casts = value

    # Each unit asks these in each step, so they repeat the sum instead of calling ``write_count``. See [Note: the host's budget].

    @property
    def write_count(self) -> int:
        """Grows with each in-place write to the sharded parameters, or to their local tensors, that autograd counts."""
        return sum(map(VERSION, self.tensors))

    @property
    def content(self) -> int:
        """Grows with each write to the model weight, from which the full one is gathered."""
        return (self._cast_count if self._counts_casts else sum(map(VERSION, self.tensors))) + self.num_updates

    @property
    def is_written(self) -> bool:
        """True if the main weight was written since the latest cast."""
        return sum(map(VERSION, self.tensors)) != self._cast_count

    @property
    def is_followed(self) -> bool:
        """True if the full weight, and what autograd saved of it, is as the model weight is."""
        return self.followed - self.num_updates == (
            self._cast_count if self._counts_casts else sum(map(VERSION, self.tensors))
        )

    def was_written_after(self, version: int) -> bool:
        """Return whether the weights that a graph of this weight version saved were written since."""
        return self.written_version > version or self.content != self.followed

    def note_cast(self, version: int, write_count: int, *, gathers: bool) -> None:
        """Note a cast for the weight version, of a main weight that had been written so often.

        Args:
            gathers: the full weight is brought up to date with it.
        """
        # ``write_count`` is the caller's, from before the cast: a write since then is not in it, and is found by ``is_written``.
        self.version, self._cast_count = version, write_count
        if gathers and (content := write_count + self.num_updates) != self.followed:
            self.followed, self.written_version = content, version

    def follow(self, version: int) -> None:
        """Note that the full weight is brought up to date with the model weight, which was written since its cast."""
        # A graph of an earlier version saved other values: ``was_written_after`` refuses its second backward.
        self.followed, self.written_version = self.content, version

    def rejoin(self, version: int) -> None:
        """Assign the weights as they are to another weight version."""
        self.version = version

    def outdate(self) -> None:
        """Make the next forward cast."""
        self.version = -1

    def note_model_written(self) -> None:
        """Note that the model weight was written together with the main weight."""
        self.updated_count = sum(map(VERSION, self.tensors))

    def note_update(self) -> None:
        """Note an optimizer's update, which writes the model weight too."""
        self.note_model_written()
        self.num_updates += 1

    def note_load(self) -> None:
        """Note that the main weights are others now, also if they were read straight into memory, which no counter sees."""
        self.updated_count = -1
        self.num_updates += 1
        # Part of what the ranks compare: a load on some ranks only would lead to different collectives.
        self.num_loads += 1
