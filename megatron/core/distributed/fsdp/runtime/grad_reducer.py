"""Gradients from backward's first write to the optimizer: held, reduced on their own stream, accumulated.

Parameters that got a gradient on no rank get ``None`` back, as they would have without sharding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from itertools import accumulate
from operator import attrgetter

import torch

from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.comm.streams import Edge, Mark, Role, Streams
from megatron.core.distributed.fsdp.config.engine_options import EngineOptions
from megatron.core.distributed.fsdp.layout.plan import NUM_KINDS, Recorder
from megatron.core.distributed.fsdp.runtime import nvtx
from megatron.core.distributed.fsdp.runtime.observer import Ballot, Observer
from megatron.core.distributed.fsdp.runtime.unit import UnitRegistry

logger = logging.getLogger(__name__)

_ABSENT = attrgetter("grads.absent")
_HAS_HOOKS = attrgetter("grads.has_hooks")


class GradReducer:
    """Reduces the gradients of groups on the reduce stream.

    Attributes:
        recorder: writes down when reduce-scatter inputs are taken and reduced, while a step is recorded.
        observer: is told of each reduction, and of those that fail.
        overlapping: groups that share addresses in the arena, by group number.
        incomplete: groups that were reduced, and whose step's last microbatch has not come.
    """

    def __init__(self, streams: Streams, recorder: Recorder, observer: Observer, options: EngineOptions) -> None:
        self.streams, self.recorder, self.observer, self._options = streams, recorder, observer, options
        self.overlapping: dict[int, set[FsdpParameterGroup]] = {}
        self.incomplete: dict[FsdpParameterGroup, None] = {}
        self._holding: dict[FsdpParameterGroup, None] = {}  # groups whose reduce-scatter input backward writes
        self._written, self._followed = streams.mark(), streams.mark()
        self._last: Mark | None = None  # of the reductions of this backward, and what follows them
        self._finished: dict[FsdpParameterGroup, None] = {}  # reduced in this backward, in order
        self._unannounced: dict[FsdpParameterGroup, None] = {}  # groups with hooks, reduced in this step
        self._reading: list[FsdpParameterGroup] = []  # groups with memory of their own that a reduction still reads

    # ---- the reduce-scatter input -------------------------------------------------------------------------------

    def use_options(self, options: EngineOptions) -> None:
        """Follow these settings of the context from now on."""
        self._options = options

    def acquire_input(self, group: FsdpParameterGroup) -> None:
        """Let backward write to the group's reduce-scatter input, or to its main gradient where nothing is reduced."""
        grads = group.grads
        if grads.input.is_acquired:
            return
        if grads.is_direct:
            grads.acquire_main()
            return
        # Reductions run behind backward: the memory of their inputs outside of the arena must not pile up. See [Note: memory that goes].
        if self._reading:
            self._free_read(keep=0 if group.least_memory else 1)
            if group in self._reading:
                self._free(group)
        if group in self._finished:  # it was reduced in this backward already
            grads.reduced.wait(Edge.INPUT_REDUCED)
        if grads.input.storage.in_arena:
            if not self.overlapping[group.index].isdisjoint(self._holding) and self._occupants(group):
                grads.move_input(None, home=grads.input.storage.flat)  # the range is taken, out of plan
            else:
                self._wait_for_readers(group)
        grads.input.acquire()
        self._holding[group] = None
        if self.recorder.is_recording and not group.least_memory:
            self.recorder.begin("inputs", group.index)

    def take_ranges(self, overlapping: dict[int, set[FsdpParameterGroup]]) -> None:
        """Use ranges of an arena, shared as ``overlapping`` says. No backward is under way."""
        self.overlapping = overlapping

    def _give_up_input(self, group: FsdpParameterGroup) -> None:
        """Release a reduce-scatter input that no reduction will read, and free its memory."""
        del self._holding[group]
        group.grads.input.release()
        if group.grads.input.home is not None:
            group.grads.move_input(group.grads.input.home)
        group.grads.input.storage.free()

    def _occupants(self, group: FsdpParameterGroup) -> list[FsdpParameterGroup]:
        """List the groups that hold a reduce-scatter input in the range of this group."""
        sharing = self.overlapping[group.index]
        return [other for other in self._holding if other in sharing and other.grads.input.home is None]

    def _wait_for_readers(self, group: FsdpParameterGroup) -> None:
        """Make compute wait until the group's range of the arena may be written."""
        # Reductions run in order, so the latest one that read the range is the one to wait for.
        readers = self.overlapping[group.index]
        for earlier in reversed(self._finished):
            if earlier in readers:
                earlier.grads.reduced.wait(Edge.INPUT_REDUCED)
                return

    def _bring_home(self, group: FsdpParameterGroup, *, copies: bool) -> None:
        """Move the group's input to where the plan says: reductions read nothing else, on any rank.

        Which ranks need this depends on the gradients that each of them gets; the order of reductions does not.
        """
        for other in self._occupants(group):
            other.grads.move_input(None, home=other.grads.input.storage.flat, copies=True)
        self._wait_for_readers(group)
        group.grads.move_input(group.grads.input.home, copies=copies)

    # ---- reductions ---------------------------------------------------------------------------------------------

    def reduce(self, group: FsdpParameterGroup, *, is_last: bool) -> None:
        """Add this backward's gradient to the group's sum, and (``is_last``) reduce the sum over all ranks.

        Ranks: all of the group's mesh, in the same order; without ``is_last`` all of its inner axis.
        """
        grads = group.grads
        self.acquire_input(group)
        grads.copy_in()
        if grads.accumulator.sums_locally and not is_last:
            grads.accumulate_partial()
            self._give_up_input(group)
            if self.recorder.is_recording:
                self.recorder.end("inputs", group.index)
        else:
            self._launch(group, is_last=is_last, has_input=True)

    def reduce_rest(self, group: FsdpParameterGroup) -> None:
        """Reduce sums over microbatches that were not reduced over all ranks. Ranks: all of the group's mesh."""
        sums = group.grads.accumulator
        if sums.sums_locally or not sums.has_sums:
            self.reduce(group, is_last=True)
            return
        self.acquire_input(group)  # for what travels
        group.grads.input.release()
        self._launch(group, is_last=True, has_input=False)

    def drop_partial(self, group: FsdpParameterGroup) -> None:
        """Drop sums over microbatches that are not reduced over all ranks."""
        # A reduction of a backward that failed may still be writing them, on its own stream.
        group.grads.reduced.wait(Edge.REDUCE_BEFORE_FREE)
        group.grads.drop_partial()

    def _launch(self, group: FsdpParameterGroup, *, is_last: bool, has_input: bool) -> None:
        grads = group.grads
        # First: the debug mode looks at the gradients where backward has written them. Sums are reduced at a step's end alone.
        self.observer.issued(NUM_KINDS * group.index + 2 + is_last + (not has_input))
        if self.recorder.is_recording:
            self.recorder.end("inputs", group.index)
        if grads.input.home is not None:
            self._bring_home(group, copies=has_input)
        if not is_last:
            self.incomplete[group] = None
        if grads.input.is_main:
            grads.show_main()
            self._finished[group] = None
            return
        # Before compute's mark is recorded: it may allocate on the compute stream what the reduction writes.
        overwrite = grads.prepare_main() if is_last else grads.prepare_sum()
        self._written.record(Role.COMPUTE)
        self._written.wait(Edge.GRADS_WRITTEN)
        nvtx.push(group.ranges.reduce)
        with self.streams.on(Role.REDUCE):  # no buffer requires gradients: there is nothing to record
            try:
                grads.reduce(overwrite=overwrite, is_last=is_last, has_input=has_input)
            except RuntimeError as error:
                what = f"reduction of the gradients of {group}"
                raise self.observer.failed(what, group.group_mesh.axes, error) from error
            finally:
                nvtx.pop()
            if self._options.poisons:
                grads.input.storage.flat.fill_(float("nan"))
        self._last = grads.reduced
        self._last.record(Role.REDUCE)
        del self._holding[group]
        self._finished.pop(group, None)  # reduced twice, it comes behind those in between
        self._finished[group] = None
        if grads.holds_own_memory:
            self._reading.append(group)
        if not self._options.overlaps_reductions:
            self._last.wait(Edge.GRADS_REDUCED)

    def _free_read(self, *, keep: int) -> None:
        """Free memory outside of the arena that reductions read, of all groups but the latest ``keep``."""
        while len(self._reading) > keep:
            self._free(self._reading[0])

    def _free(self, group: FsdpParameterGroup) -> None:
        self._reading.remove(group)
        group.grads.reduced.wait(Edge.REDUCE_BEFORE_FREE)
        group.grads.free_own_memory()

    # ---- the end of a backward ----------------------------------------------------------------------------------

    @property
    def lacking(self) -> list[FsdpParameterGroup]:
        """The groups that this backward, or an earlier one of the step, has reduced and that lack gradients on this rank."""
        return list(dict.fromkeys(filter(_ABSENT, (*self.incomplete, *self._finished))))

    def follow_up(self, act: Callable[[], None]) -> None:
        """Run ``act`` on the reduce stream, behind all reductions of this backward."""
        with self.streams.on(Role.REDUCE):
            act()
        self._last = self._followed
        self._last.record(Role.REDUCE)

    def finish(self) -> None:
        """Make compute wait for all reductions of this backward."""
        self._unannounced.update(dict.fromkeys(filter(_HAS_HOOKS, self._finished)))
        if self._last is not None:
            self._last.wait(Edge.GRADS_REDUCED)  # reductions run in order
        self._free_read(keep=0)
        self._finished.clear()
        self._last = None

    def call_hooks(self) -> None:
        """Call the hooks of the parameters whose gradients of this step are complete. No pass is under way."""
        # Taken before they are called: a hook may begin the next pass, which adds to them.
        self.incomplete.clear()
        groups, self._unannounced = self._unannounced, {}
        for group in groups:
            group.grads.call_hooks()
            group.grads.free_main_if_cleared()

    def abandon(self, group: FsdpParameterGroup) -> None:
        """Drop what the group's unfinished backward has written."""
        self._unannounced.pop(group, None)
        self.incomplete.pop(group, None)
        group.grads.drop_unreduced()
        if group in self._holding:
            self._give_up_input(group)


class MissingGradients:
    """Counts at the end of a step's last backward which gradients are missing on all ranks.

    Ranks that have all gradients take part without waiting for the answer: they know theirs. Only a rank that lacks some
    reads it, which blocks its host. [Note: gradients that are missing]. The observer's numbers travel in the same
    all-reduce.
    """

    def __init__(self, registry: UnitRegistry, grad_reducer: GradReducer, device: torch.device) -> None:
        self._registry, self._grad_reducer, self.device = registry, grad_reducer, device
        self._observer = grad_reducer.observer
        self._ballots: list[Ballot] | None = None
        self._has_warned = False
        self._lacking: list[FsdpParameterGroup] = []
        # What this rank lacked, and what all ranks did, in the step before.
        self._latest: tuple[dict[int, list[int]], dict[int, list[int]]] = ({}, {})

    def rebuild_ballots(self) -> None:
        """Rebuild the ballots before the next count, because the set of trained groups changed. Ranks: all."""
        self._ballots = None

    def ask(self) -> None:
        """Send the other ranks what this one lacks. Ranks: all of the groups' meshes; all reductions are launched."""
        self._lacking = self._grad_reducer.lacking
        # Where no group has other ranks there are no ballots, and nobody to ask; the observer hears of the step's end all the same.
        if self._ballots is None or self._ballots:
            self._grad_reducer.follow_up(self._count)
        else:
            self._observer.step_ended(self._ballots)

    def resolve(self) -> None:
        """Set ``param.grad`` to None where no rank had a gradient. Compute has waited for the answer to ``ask``."""
        lacking, self._lacking = self._lacking, []
        if not lacking:
            return
        lacks = {group.index: sorted(group.grads.absent) for group in lacking}
        if not self._is_capturing:
            self._latest = (lacks, self._missing_everywhere(lacking, lacks))
        if self._latest[0] == lacks:  # a captured step does as the step before it
            for group in lacking:
                group.grads.remove(self._latest[1][group.index])

    @property
    def _is_capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _count(self) -> None:
        """Count the ranks that have each gradient, on the current stream."""
        if self._ballots is None:
            self._ballots = self._make_ballots()
        self._observer.step_ended(self._ballots)
        for ballot in self._ballots:
            ballot.counts.copy_(ballot.everything)
            mine = [group for group in self._lacking if group.index in ballot.first]
            # A copy from the host cannot be captured; the replay sends ones, and ``resolve`` repeats the answer of the step before.
            if mine and not self._is_capturing:
                places = [ballot.first[group.index] + index for group in mine for index in sorted(group.grads.absent)]
                ballot.counts[torch.tensor(places, device=self.device)] = 0.0
            try:
                for axis in ballot.axes:
                    axis.all_reduce(ballot.counts, ballot.counts)
            except RuntimeError as error:
                raise self._observer.failed("count of missing gradients", ballot.axes, error) from error

    def _missing_everywhere(
        self, lacking: Iterable[FsdpParameterGroup], lacks: dict[int, list[int]]
    ) -> dict[int, list[int]]:
        """Return the parameters that got a gradient on no rank, by group number."""
        found = dict(lacks)
        for ballot in self._ballots or []:
            mine = [group for group in lacking if group.index in ballot.first]
            # Only a rank that lacks some blocks its host here: the others know their answer.
            counts = ballot.counts.tolist() if mine else []
            for group in mine:
                number_of = counts[ballot.first[group.index] :]
                found[group.index] = [index for index in lacks[group.index] if not number_of[index]]
                elsewhere = [index for index in lacks[group.index] if number_of[index]]
                if elsewhere and not self._has_warned:
                    self._has_warned = True
                    logger.warning(
                        "%s got no gradient on this rank and one on %d others: zeros count for it here, as for all such parameters",
                        group.name_of(elsewhere[0]),
                        int(number_of[elsewhere[0]]),
                    )
        return found

    def _make_ballots(self) -> list[Ballot]:
        by_ranks: dict[tuple[tuple[int, ...], ...], list[FsdpParameterGroup]] = {}
        for group in self._registry.groups:
            ranks = tuple(tuple(axis.ranks) for axis in group.group_mesh.axes if axis.size > 1)
            by_ranks.setdefault(ranks, []).append(group)
        ballots = []
        for ranks, members in by_ranks.items():
            trained, group_mesh = [group for group in members if group.trainable], members[0].group_mesh
            if trained and ranks:
                *starts, count = accumulate((len(group.sharded) for group in trained), initial=0)
                first = {group.index: start for group, start in zip(trained, starts, strict=True)}
                axes = tuple(axis for axis in group_mesh.axes if axis.size > 1)
                ones = torch.ones(count + self._observer.num_extra, dtype=torch.float32, device=self.device)
                indices = frozenset(group.index for group in members)
                ballots.append(Ballot(axes, group_mesh.mesh, indices, first, ones, torch.empty_like(ones)))
        return ballots
