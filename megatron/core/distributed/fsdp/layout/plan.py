"""The plan of a step: the order in which units run, what is prefetched when, and where their buffers lie.

The first step is recorded (``Recorder``) and made into a ``Plan``. Buffers that are alive together never overlap.

See [Note: several graphs in flight].
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from megatron.core.distributed.fsdp.layout.arena import LiveRange, plan_arena

# A record longer than this many uses is not a step; it is dropped before it takes more memory.
_MAX_USES = 100_000
NO_UNITS: frozenset[int] = frozenset()

KINDS = (
    "backward's all-gather",
    "forward's all-gather",
    "reduction",
    "last reduction",
    "reduction of sums",
    "sync",
    "update",
    "load",
)
"""What an entry of ``Observer.issued`` is of a group: the entry is the group's number times ``NUM_KINDS`` plus a place in here.

A sync is of weights that rest whole, which a rank may do by itself. An optimizer's update of a context is one entry, of the first group
that it writes to. A load is one of each module that it writes to.
"""

NUM_KINDS, GATHERS, REDUCTIONS, SYNC, UPDATE, LOAD = len(KINDS), (0, 1), (2, 3, 4), 5, 6, 7  # places in KINDS


class Use(NamedTuple):
    """A forward or backward of a unit, which needs its weights."""

    unit: int
    backward: bool


class Pool(NamedTuple):
    """Groups whose buffers lie in one arena, and its bytes."""

    groups: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class RangePlan:
    """Addresses of the groups' buffers, in one arena for each pool: memory of one transport, or of none in particular.

    Attributes:
        offsets: bytes between the start of a group's arena and its buffer, by group.
        overlapping: groups whose buffer shares addresses with a group's, by group.
    """

    pools: tuple[Pool, ...]
    offsets: Mapping[int, int]
    overlapping: Mapping[int, tuple[int, ...]]

    @property
    def nbytes(self) -> int:
        """Bytes of all arenas."""
        return sum(pool.nbytes for pool in self.pools)


@dataclass(frozen=True)
class Plan:
    """What the engine does in a step, from its first forward to the end of its last backward.

    Attributes:
        uses: [U] uses of units, in order.
        ahead: [U] uses whose weights are prefetched when a use begins.
        turns: [U] True where backward follows forward: the unit stays unsharded until its own backward, which comes soon.
        weights: addresses of the gathered weights.
        inputs: addresses of the reduce-scatter inputs.
        stays_unsharded_nbytes: bytes of the groups whose weights stay gathered from a step's first forward to its last backward.
    """

    uses: tuple[Use, ...]
    ahead: tuple[tuple[Use, ...], ...]
    turns: tuple[bool, ...]
    weights: RangePlan
    inputs: RangePlan
    stays_unsharded_nbytes: Mapping[int, int]

    @cached_property
    def horizons(self) -> tuple[int, ...]:
        """Number of uses [U] whose weights are gathered, or on their way, once each use has begun."""
        return tuple(accumulate(enumerate(self.ahead, 1), lambda end, at: max(end, at[0]) + len(at[1]), initial=0))[1:]

    @cached_property
    def staying(self) -> tuple[frozenset[int], ...]:
        """Units [U] that are not resharded when their forward ends at a use, since the next pass needs them at once."""
        # A step of forwards alone (an evaluation) is followed by the same forwards, which begin with this unit.
        again = Use(self.uses[0].unit, False)
        stays = []
        # Computed once for a plan: a pass asks at the end of each unit's forward.
        for at, (use, following) in enumerate(zip(self.uses, (*self.uses[1:], None), strict=True)):
            end = at
            if self.turns[at]:
                end = self.uses.index(Use(use.unit, True), at) + 1
            elif following == again:
                end = self.horizons[at]
            elif following == use:  # the next of several modules that are one unit
                end = at + 2
            stays.append(frozenset(use.unit for use in self.uses[at + 1 : end]) or NO_UNITS)
        return tuple(stays)

    @cached_property
    def first_uses(self) -> dict[int, int]:
        """Index of each unit's first use."""
        return {use.unit: at for at, use in reversed(list(enumerate(self.uses)))}


# What a group has a buffer for: its gathered weights, and its reduce-scatter input.
Kind = Literal["weights", "inputs"]
_Ranges = dict[Kind, dict[int, list[LiveRange]]]
# Ticks from a range's last use to its end. A reduction still reads while the next unit's backward writes.
_OUTLIVES: dict[Kind, int] = {"weights": 1, "inputs": 2}


class Recorder:
    """Uses of units, and times at which buffers are alive, as one step runs; time is counted in uses.

    A new recorder records. Callers ask ``is_recording`` before they report to it: most steps are not recorded, and come here often.

    Attributes:
        uses: of units, in order.
        is_recording: a step is recorded.
    """

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Record what runs from now on, and drop what was recorded."""
        self.is_recording = True
        self.uses: list[Use] = []
        self._ranges: _Ranges = {kind: defaultdict(list) for kind in _OUTLIVES}
        self._open: dict[tuple[Kind, int], int] = {}

    def stop(self) -> None:
        """Keep what was recorded, and record nothing more."""
        self.is_recording = False

    @property
    def _now(self) -> int:
        return max(len(self.uses) - 1, 0)

    @property
    def is_too_long(self) -> bool:
        """True if more uses are recorded than any step has."""
        return len(self.uses) > _MAX_USES

    def use(self, unit: int, *, backward: bool) -> None:
        """Record that a unit's forward or backward begins."""
        self.uses.append(Use(unit, backward))

    def begin(self, kind: Kind, group: int) -> None:
        """Record that the group's buffer is in use from now on."""
        # The earlier begin counts: a group that two graphs use is alive from the first on. See [Note: several graphs in flight].
        self._open.setdefault((kind, group), self._now)

    def end(self, kind: Kind, group: int) -> None:
        """Record that the group's weights are resharded, or that the reduction of its input has begun."""
        begin = self._open.pop((kind, group), None)
        if begin is not None:
            # Uses, not time: where a range ends depends on the order alone, which ranks have in common.
            self._ranges[kind][group].append(LiveRange(group, begin, self._now + _OUTLIVES[kind]))

    @property
    def ranges(self) -> _Ranges:
        """Times at which buffers were alive, by kind and group. Reading it ends the range of each that is alive now."""
        # What is alive now would be missing from the plan, and share addresses with what runs later.
        for kind, group in list(self._open):
            self.end(kind, group)
        return self._ranges

    def add(self, ranges: Mapping[Kind, Mapping[int, list[LiveRange]]]) -> None:
        """Add the times at which buffers were alive on another rank."""
        for kind, others in ranges.items():
            for group, live in others.items():
                # Ranks may keep buffers for differently long (an input that gets no gradient on some); offsets must be the same.
                self._ranges[kind][group] = list(dict.fromkeys([*self._ranges[kind][group], *live]))

    def plan(
        self,
        *,
        weight_nbytes: Mapping[int, int],
        input_nbytes: Mapping[int, int],
        groups_of: Mapping[int, list[int]],
        pool_of: Mapping[int, int] | None = None,
        prefetch_depth_of: Mapping[int, tuple[int, int]] | None = None,
        ahead_nbytes: int = 0,
        memory_budget_nbytes: int = 0,
        keeping: Sequence[int] = (),
    ) -> Plan:
        """Make the plan that repeats what was recorded, with weights gathered ahead of their use.

        Args:
            weight_nbytes: bytes of each group's gathered weights.
            input_nbytes: bytes of each group's reduce-scatter input.
            groups_of: groups whose weights a unit uses; not of units that were removed since.
            pool_of: the pool of each group's buffers; one for all when None.
            prefetch_depth_of: how many units with weights are prefetched when a unit's (forward, backward) begins; 1 for
                all when None.
            ahead_nbytes: prefetch more units until weights of so many bytes are on their way; a depth of 0 prefetches none.
            memory_budget_nbytes: bytes that may be spent on weights that stay gathered, the last units of forward first.
            keeping: units whose weights stay gathered whatever the budget is.
        """
        weights, inputs = self.ranges["weights"], self.ranges["inputs"]
        # Units without weights are not worth a gather; replicated weights are worth one (their synchronisation).
        sizes = {unit: sum(weight_nbytes.get(group, 1) for group in groups) for unit, groups in groups_of.items()}
        begins, ahead = self._gather_ahead(sizes, prefetch_depth_of or {}, ahead_nbytes)
        # A buffer is written from the time at which its gather begins, not from its use.
        for group, ranges in weights.items():
            weights[group] = [LiveRange(group, begins[r.begin], r.end) for r in ranges]
        turns = [False] * len(self.uses)
        for at, (use, following) in enumerate(pairwise(self.uses)):
            if use.backward or not following.backward:
                continue
            # Its outputs take no part in the loss: there is no backward to wait for.
            if Use(use.unit, True) not in self.uses[at:]:
                continue
            turns[at] = True
            again = self.uses.index(Use(use.unit, True), at)
            for group in groups_of.get(use.unit, ()):
                if weights[group]:
                    weights[group].append(LiveRange(group, at, again + 1))
        stays_unsharded_nbytes = self._stays_unsharded(weight_nbytes, groups_of, memory_budget_nbytes, keeping)
        for group in stays_unsharded_nbytes:  # it shares its range with none. See [Note: weights that stay unsharded].
            weights[group] = [LiveRange(group, 0, len(self.uses) + 1)]
        return Plan(
            tuple(self.uses),
            tuple(ahead),
            tuple(turns),
            _range_plan(weights, weight_nbytes, pool_of or {}),
            _range_plan(inputs, input_nbytes, pool_of or {}),
            stays_unsharded_nbytes,
        )

    def _stays_unsharded(
        self,
        weight_nbytes: Mapping[int, int],
        groups_of: Mapping[int, list[int]],
        memory_budget_nbytes: int,
        keeping: Sequence[int],
    ) -> dict[int, int]:
        """Choose groups that stay unsharded between forward and backward, and return their bytes.

        Each saves its second gather. Those of ``keeping``; besides as many as fit the budget, the last units of forward first.
        """
        chosen: dict[int, int] = {}
        turning = [use for use in self.uses if not use.backward and Use(use.unit, True) in self.uses]
        for use in (use for use in turning if use.unit in keeping):
            chosen.update({g: weight_nbytes[g] for g in groups_of.get(use.unit, ()) if g in weight_nbytes})
        memory_budget_nbytes += sum(chosen.values())
        for use in reversed(turning):
            own = {g: weight_nbytes[g] for g in groups_of.get(use.unit, ()) if g in weight_nbytes and g not in chosen}
            if sum(chosen.values()) + sum(own.values()) > memory_budget_nbytes:
                break
            chosen.update(own)
        return chosen

    def _gather_ahead(
        self, nbytes: Mapping[int, int], depth_of: Mapping[int, tuple[int, int]], ahead_nbytes: int
    ) -> tuple[list[int], list[tuple[Use, ...]]]:
        """Return the use [U] at whose begin each use's weights are gathered, and the uses [U] that are gathered at each."""
        begins, upto = list(range(len(self.uses))), 0
        # Of several modules that are one unit, the first one's use gathers.
        sizes = [nbytes.get(use.unit, 0) for use in self.uses]
        sizes = [0 if at and self.uses[at - 1] == self.uses[at] else size for at, size in enumerate(sizes)]
        ahead: list[tuple[Use, ...]] = []
        for now, use in enumerate(self.uses):
            upto = max(upto, now)
            first, depth = upto + 1, depth_of.get(use.unit, (1, 1))[use.backward]
            on_their_way = [size for size in sizes[now + 1 : first] if size]
            while depth and upto + 1 < len(self.uses):
                if len(on_their_way) >= depth and sum(on_their_way) >= ahead_nbytes:
                    break
                upto += 1
                begins[upto] = now
                if sizes[upto]:
                    on_their_way.append(sizes[upto])
            ahead.append(tuple(self.uses[first : upto + 1]))
        return begins, ahead


def _range_plan(
    ranges: Mapping[int, list[LiveRange]], nbytes: Mapping[int, int], pool_of: Mapping[int, int]
) -> RangePlan:
    # An arena for each pool, since transports take memory of their own kind only. See [Note: pools].
    members: dict[int, list[int]] = defaultdict(list)
    for group in sorted(ranges):
        if ranges[group] and group in nbytes:
            members[pool_of.get(group, 0)].append(group)
    pools: list[Pool] = []
    offsets: dict[int, int] = {}
    overlapping: dict[int, tuple[int, ...]] = {}
    for _, groups in sorted(members.items()):
        live = [LiveRange(at, r.begin, r.end) for at, group in enumerate(groups) for r in ranges[group]]
        arena = plan_arena([nbytes[group] for group in groups], live)
        pools.append(Pool(tuple(groups), arena.nbytes))
        for group, offset, others in zip(groups, arena.offsets, arena.overlapping, strict=True):
            offsets[group], overlapping[group] = offset, tuple(groups[other] for other in others)
    return RangePlan(tuple(pools), offsets, overlapping)
