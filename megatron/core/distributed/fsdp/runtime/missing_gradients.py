"""Gives ``None`` back to parameters that got a gradient on no rank, as they would have without sharding."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.runtime.grad_reducer import GradReducer
from megatron.core.distributed.fsdp.runtime.observer import Ballot, Observer
from megatron.core.distributed.fsdp.runtime.unit import UnitRegistry

logger = logging.getLogger(__name__)


class MissingGradients:
    """Counts at the end of a step's last backward which gradients are missing on all ranks.

    Ranks that have all gradients take part without waiting for the answer: they know theirs. Only a rank that lacks some
    reads it, which blocks its host. [Note: gradients that are missing]. The observer's numbers travel in the same
    all-reduce.
    """

    def __init__(
        self, registry: UnitRegistry, grad_reducer: GradReducer, observer: Observer, device: torch.device
    ) -> None:
        self._registry, self._grad_reducer, self._observer, self.device = registry, grad_reducer, observer, device
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
            axes = [axis for axis in group.group_mesh.axes if axis.size > 1]
            if axes:
                by_ranks.setdefault(tuple(tuple(axis.ranks) for axis in axes), []).append(group)
        ballots = []
        for members in by_ranks.values():
            first, count = {}, 0
            for group in members:
                if group.trainable:
                    first[group.index] = count
                    count += len(group.sharded)
            if first:
                axes = [axis for axis in members[0].group_mesh.axes if axis.size > 1]
                indices = frozenset(group.index for group in members)
                ones = torch.ones(count + self._observer.num_extra, dtype=torch.float32, device=self.device)
                ballots.append(Ballot(tuple(axes), members[0].group_mesh.mesh, indices, first, ones))
        return ballots
