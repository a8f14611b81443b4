"""The scales of all weights of a context whose codec scales them, brought up to date once for each weight version."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.buffers.scaled_weights import ScaledWeights, Scales
from megatron.core.distributed.fsdp.comm.streams import Edge
from megatron.core.distributed.fsdp.runtime.unsharder import Unsharder


class WeightScales:
    """Measures main weights, reduces what each rank found, and computes scales: once for all groups of a context.

    The first all-gather of a weight version does it, on the gather stream, before any group is encoded: every rank comes
    to it at the same place. Where an update has written the bytes, with scales that were known before it, that gather waits
    for its own unit's update alone; what the update measured is reduced before the next update, which needs the next
    scales. Groups that share codec and ranks are a batch, whose scales lie in one vector.
    """

    def __init__(self, unsharder: Unsharder) -> None:
        self.unsharder = unsharder
        self._members: list[weakref.ref[ScaledWeights]] = []
        self._batches: list[_Batch] = []
        self._batched: list[int] = []  # ids of the weights in batches
        self._version = -1

    def add(self, group: FsdpParameterGroup) -> None:
        """Serve the group, if its codec scales weights."""
        if isinstance(group.weights, ScaledWeights):
            group.weights.prepare_scales = _preparation(weakref.ref(self))
            self._members.append(weakref.ref(group.weights))
            self._version, self._batches, self._batched = -1, [], []

    def clear(self) -> None:
        """Forget all groups, which another context will serve."""
        self._members, self._batches, self._batched = [], [], []

    def prepare(self) -> None:
        """Bring all scales up to date with the main weights. Ranks: all that hold parts of them."""
        if self._version == self.unsharder.weight_version:
            return
        self._version = self.unsharder.weight_version
        members = [weights for ref in self._members if (weights := ref()) is not None and weights.follows_main]
        keys = list(map(id, members))
        if keys != self._batched:
            self._batched, self._batches = keys, _batches(members)
        for batch in self._batches:
            batch.prepare()

    def begin_update(self) -> None:
        """Compute the scales with which the coming update writes bytes. Ranks: all that hold parts of the weights."""
        for batch in self._batches:
            batch.begin_update()

    def begin_replay(self) -> None:
        """Make the scales what the first gather of a captured step found: an update's, whatever ran eagerly since."""
        for batch in self._batches:
            batch.restore_update()


class _Batch:
    """Groups of one codec and dtype whose main weights lie on the same ranks, and their scales in one vector."""

    def __init__(self, members: list[ScaledWeights]) -> None:
        self._members = [weakref.ref(weights) for weights in members]
        self._codec, self._dtype = members[0].codec, members[0].dtypes.compute
        numbers = [weights.scales.scale.numel() for weights in members]
        self._scales = Scales.make(self._codec, sum(numbers), members[0].device)
        # Kept: their memory belongs to the stream that made them, and is read on this one.
        self._former = [weights.scales for weights in members]
        begin = 0
        for weights, number in zip(members, numbers, strict=True):
            own = self._scales.part(begin, begin + number)
            own.copy_(weights.scales)
            weights.take_scales(own)
            begin += number
        # This version's bytes are those that an update wrote, whose maxima are not reduced yet; and whether one ever was.
        self._reads_update = self._follows_updates = False

    @property
    def members(self) -> list[ScaledWeights]:
        """The groups that still exist."""
        return [weights for ref in self._members if (weights := ref()) is not None]

    def prepare(self) -> None:
        """Bring the scales up to date for a weight version. Ranks: all that hold parts of the weights."""
        members = self.members
        is_second = self._reads_update  # version since the update: weights may have been written otherwise
        reads_update = self._codec.has_history and not is_second and all(weights.was_updated for weights in members)
        for weights in members:
            weights.reads_update = reads_update
            if not (reads_update and weights.is_as_updated):
                weights.updated.wait(Edge.UNIT_UPDATED)
        self.begin_update()
        if reads_update:
            self._reads_update = self._follows_updates = True
            scales = self._scales
            self._codec.used_scales(scales.scale).copy_(self._codec.used_scales(scales.following))
            torch.reciprocal(scales.scale, out=scales.inverse)
            for weights in members:
                weights.measure(anew=False)
        else:
            self._refresh(members)

    def begin_update(self) -> None:
        """Reduce what the latest update measured and compute the scales of the next, if that has not been done."""
        reads_update, self._reads_update = self._reads_update, False
        members = self.members
        if reads_update and all(weights.has_following for weights in members):  # nothing was loaded since
            amax, _ = self._reduced(members)
            self._remember(amax)
            self._look_ahead(amax, members)

    def restore_update(self) -> None:
        """Be as after an update, which a captured step begins with, if forwards have only read what one wrote."""
        self._reads_update = False
        members = self.members
        if self._follows_updates and not all(weights.was_updated for weights in members):
            self._codec.used_scales(self._scales.following).copy_(self._codec.used_scales(self._scales.scale))
            self._scales.amax.zero_()
            for weights in members:
                weights.write_as_update()

    def _refresh(self, members: list[ScaledWeights]) -> None:
        codec, scales = self._codec, self._scales
        is_captured = any(weights.is_captured for weights in members)
        # A step that wrote bytes took the scales that follow from the history, whatever the new weights are.
        has_stepped = not is_captured and any(weights.was_updated for weights in members)
        for weights in members:
            weights.measure(anew=is_captured)
        amax, former = self._reduced(members)
        scale = codec.next_scale(amax, former, scales.history)
        if codec.has_history:
            if not has_stepped:
                # Weights that are as they were (an evaluation, another forward) keep their scales: no step has passed.
                scale = torch.where((amax != scales.history[0]).any(), scale, former)
            self._remember(amax)
        former.copy_(scale)
        for weights in members:
            if weights.restarts:
                weights.restart_scales()
        torch.reciprocal(scales.scale, out=scales.inverse)
        self._look_ahead(amax, members)

    def _reduced(self, members: list[ScaledWeights]) -> tuple[torch.Tensor, torch.Tensor]:
        """Reduce what was measured; return it, and the scales."""
        codec, scales = self._codec, self._scales
        if members:
            # Of parts of a weight under one name the histories must be one.
            members[0].reduce_maxima(scales.amax, in_tensor_group=codec.has_history)
        scales.amax.copy_(scales.amax.to(self._dtype))  # of the rounded weights: rounding keeps the order
        return codec.used_scales(scales.amax), codec.used_scales(scales.scale)

    def _remember(self, amax: torch.Tensor) -> None:
        """Put the maxima into the history, if a step has passed."""
        if self._codec.has_history:
            history = self._scales.history
            has_changed = (amax != history[0]).any()
            history.copy_(torch.where(has_changed, torch.cat((amax.unsqueeze(0), history[:-1])), history))

    def _look_ahead(self, amax: torch.Tensor, members: list[ScaledWeights]) -> None:
        """Compute the scales that follow, and begin to measure anew."""
        codec, scales = self._codec, self._scales
        if codec.has_history:
            scale = codec.next_scale(amax, codec.used_scales(scales.scale), scales.history)
            codec.used_scales(scales.following).copy_(scale)
        scales.amax.zero_()
        for weights in members:
            weights.was_updated, weights.has_following = False, True


def _batches(members: list[ScaledWeights]) -> list[_Batch]:
    kinds: dict[tuple[Any, ...], list[ScaledWeights]] = {}
    for weights in members:
        ranks = tuple(tuple(axis.ranks) for axis in weights.scale_axes)
        kinds.setdefault((weights.codec, ranks, weights.dtypes.compute), []).append(weights)
    return [_Batch(of_kind) for of_kind in kinds.values()]


def _preparation(scales: weakref.ref[WeightScales]) -> Callable[[], None]:
    def prepare() -> None:
        own = scales()
        assert own is not None, "a context lives as long as its units"
        own.prepare()

    return prepare
