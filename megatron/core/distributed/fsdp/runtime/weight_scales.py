"""The scales of all weights of a context whose codec scales them, brought up to date once for each weight version."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.buffers.scaled_weights import ScaledWeights, Scales
from megatron.core.distributed.fsdp.runtime.streams import Edge, Streams
from megatron.core.distributed.fsdp.runtime.unsharder import Unsharder


class WeightScales:
    """Measures main weights, reduces what each rank found, and computes scales: once for all groups of a context.

    The first all-gather of a weight version does it, on the gather stream, before any group is encoded: every rank comes
    to it at the same place. Groups that share codec and ranks are a batch, whose scales lie in one vector.
    """

    def __init__(self, streams: Streams, unsharder: Unsharder) -> None:
        self.streams, self.unsharder = streams, unsharder
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
        for weights in members:
            if weights.updated is not None:
                self.streams.wait(Edge.UNIT_UPDATED, weights.updated)
                weights.updated = None
        for batch in self._batches:
            batch.refresh()


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

    def refresh(self) -> None:
        codec, scales = self._codec, self._scales
        members = [weights for ref in self._members if (weights := ref()) is not None]
        is_captured = members[0].is_captured
        # A step that wrote bytes took the scales that follow from the history, whatever the new weights are.
        has_stepped = not is_captured and any(weights.was_updated for weights in members)
        for weights in members:
            weights.measure(anew=is_captured)
            weights.was_updated = False
        if members:
            # Of parts of a weight under one name the histories must be one.
            members[0].reduce_maxima(scales.amax, in_tensor_group=codec.has_history)
        scales.amax.copy_(scales.amax.to(self._dtype))  # of the rounded weights: rounding keeps the order
        amax, former = codec.used_scales(scales.amax), codec.used_scales(scales.scale)
        scale = codec.next_scale(amax, former, scales.history)
        if codec.has_history:
            # Weights that are as they were (an evaluation, another forward) keep their scales: no step has passed.
            has_changed = (amax != scales.history[0]).any()
            if not has_stepped:
                scale = torch.where(has_changed, scale, former)
            history = torch.cat((amax.unsqueeze(0), scales.history[:-1]))
            scales.history.copy_(torch.where(has_changed, history, scales.history))
        former.copy_(scale)
        for weights in members:
            if weights.restarts:
                weights.restart_scales()
        torch.reciprocal(scales.scale, out=scales.inverse)
        if codec.has_history:
            codec.used_scales(scales.following).copy_(codec.next_scale(amax, former, scales.history))
        scales.amax.zero_()
        for weights in members:
            weights.has_following = True


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
