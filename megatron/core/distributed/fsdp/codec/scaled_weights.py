"""Weights whose codec scales them: bytes at rest, on the wire and in use, and the scales that the groups of a context share."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp.buffers.param_slots import each
from megatron.core.distributed.fsdp.buffers.weights import Weights
from megatron.core.distributed.fsdp.codec.float8 import SCALE_ALIGNMENT, UpdateEncoding
from megatron.core.distributed.fsdp.codec.scaling import ScalingCodec, pieces_of
from megatron.core.distributed.fsdp.comm.streams import Edge
from megatron.core.distributed.fsdp.comm.transport import Transport
from megatron.core.distributed.fsdp.runtime.unsharder import Unsharder


@dataclass(frozen=True)
class Scales:
    """The scales of N tensors or blocks, equal on all ranks that hold parts of them.

    Args:
        amax: [N] largest absolute values of the main weights, as far as they were measured since the last scales; else 0.
        scale: [N] what main weights are multiplied by.
        inverse: [N] its reciprocals, which layers read.
        following: [N] the ``scale`` of the next step where the recipe knows it before.
        history: [H, T] ``amax`` of the T weights in the latest steps, the latest first; H is 0 where the recipe has no history.
    """

    amax: torch.Tensor
    scale: torch.Tensor
    inverse: torch.Tensor
    following: torch.Tensor
    history: torch.Tensor

    @staticmethod
    def make(codec: ScalingCodec, number: int, device: torch.device) -> Scales:
        """Allocate scales of 1."""
        amax = torch.zeros(number, device=device)
        scale, inverse, following = (torch.ones(number, device=device) for _ in range(3))
        num_steps = codec.amax_history_len if codec.has_history else 0
        history = torch.zeros(num_steps, number // SCALE_ALIGNMENT, device=device)
        return Scales(amax, scale, inverse, following, history)

    def part(self, begin: int, end: int) -> Scales:
        """Return views of elements [begin, end)."""
        history = self.history[:, begin // SCALE_ALIGNMENT : end // SCALE_ALIGNMENT]
        return Scales(
            self.amax[begin:end], self.scale[begin:end], self.inverse[begin:end], self.following[begin:end], history
        )

    def copy_(self, other: Scales) -> None:
        for own, theirs in zip(vars(self).values(), vars(other).values(), strict=True):
            own.copy_(theirs)


class ScaledWeights(Weights):
    """As ``Weights``, with a model weight of one byte for each element that is multiplied with scales.

    Main weights are rounded to the nominal dtype before they are scaled, so that the numbers are those of layers that
    quantise a gathered weight. Scales are brought up to date for all such groups of a context together (``WeightScales``), before the
    first of them is encoded. What is encoded depends on the other ranks' main weights too, so ranks write weights
    between steps, not between the forwards of one.

    Attributes:
        follows_main: the bytes follow a main weight, and their scales those of the context's other groups.
        scales: of the group's weights, one after the other.
        has_following: ``scales.following`` is what the next step needs. From ``expect_update``, when scales are computed, until a load.
        was_updated: an update has measured the main weights, and written bytes where it could, since the last scales. From
            ``begin_update`` until ``expect_update``, or until that work is discarded (``_forget_update``).
        reads_update: the bytes of this weight version are those that an update wrote. Set by ``begin_version``, for each version.

    A step of one update goes through ``begin_update`` (optimizer), ``begin_version``, ``measure``, ``expect_update`` (``_Batch``, at the first
    gather of the next version), ``sync`` (each group's own first gather). See [Note: updates that encode].
    """

    shares_counter = False  # what layers multiply are tensors of their own, each with a counter
    follows_main = True
    codec: ScalingCodec
    scales: Scales
    _context_scales: weakref.ref[WeightScales]
    has_following = was_updated = reads_update = False
    _is_encoded = False  # ``measure`` found the bytes of this version written, so the next ``sync`` does not encode

    def __init__(self, originals: Sequence[torch.Tensor], **settings: Any) -> None:
        self._is_cut = any(placement.is_shard() for placement in settings["placements"].parameter)
        super().__init__(originals, **settings)

    def _follow_main(self) -> None:
        super()._follow_main()
        assert self.encoded_piece is not None, "bytes are no main weights"
        if not hasattr(self, "scales"):
            self._forget_scales()
            self.take_scales(Scales.make(self.codec, self.codec.num_scales(self.layout), self.device))
        main, target = self.main.local.data, self.encoded_piece
        pieces = pieces_of(self.layout, self.main.begin, self.main.end)
        self._parts = [(piece, main[piece.begin : piece.end], target[piece.begin : piece.end]) for piece in pieces]

    def join(self, scales: WeightScales) -> None:
        """Take the scales from this object of the context from now on."""
        self._context_scales = weakref.ref(scales)

    def take_scales(self, scales: Scales) -> None:
        """Keep the scales in this memory from now on; its content is theirs."""
        self.scales = scales
        self._amax, self._scale, self._inverse, self._following = (
            self.codec.scales_by_weight(flat, self.layout)
            for flat in (scales.amax, scales.scale, scales.inverse, scales.following)
        )
        for parameter, inverse in zip(getattr(self, "unsharded", ()), self._inverse, strict=False):
            self.codec.wrapper.rebind(parameter, inverse=inverse)

    # ---- main to model weight -----------------------------------------------------------------------------------

    @property
    def is_captured(self) -> bool:
        """Whether what is done now becomes part of a CUDA graph."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    @property
    def restarts(self) -> bool:
        """Whether the next scales are those of the weights as they are, without a history: not all were restored."""
        return bool(self._to_restore)

    @property
    def is_as_updated(self) -> bool:
        """Whether main weights are as the latest update left them, which measured them."""
        return self.was_updated and self.freshness.write_count == self.freshness.updated_count

    def begin_update(self, *, is_whole: bool) -> UpdateEncoding | None:
        self._forget_update()  # two updates without a forward between them
        # A captured step that began with a measurement does so in each replay, whatever ran eagerly between them.
        measures_later = self.is_captured and not self.reads_update
        if measures_later or not (is_whole and self.has_following and self.codec.encodes_by_tensor):
            return None
        self.was_updated = True
        target = self.encoded_piece if self.codec.has_history else None
        return UpdateEncoding(target, self.scales.following, self.scales.amax, self.dtypes.compute)

    def end_partial_update(self) -> None:
        if self.is_captured and self.reads_update:
            self.write_as_update()

    def write_as_update(self) -> None:
        """Measure main weights and write their bytes, as an update does. Only where scales depend on nothing but earlier steps."""
        for piece, main, target in self._parts:
            self.codec.raise_amax(self._amax[piece.weight], main, piece)
            self.codec.write(target, main, self._following[piece.weight], piece, nominal=self.dtypes.compute)
        self.was_updated = True
        self.freshness.note_model_written()

    def begin_version(self, *, reads_update: bool) -> None:
        """Begin a weight version, whose bytes an update wrote if ``reads_update``; else wait for the update that wrote main weights."""
        self.reads_update = reads_update
        # The gather waits for the update of its own unit, if the bytes are there already.
        if not (reads_update and self.is_as_updated):
            self.updated.wait(Edge.UNIT_UPDATED)

    def expect_update(self) -> None:
        """Note that ``scales.following`` is what the next update needs, and that what the last one measured was used."""
        self.was_updated, self.has_following = False, True

    def measure(self, *, again: bool) -> None:
        """Raise ``scales.amax`` to the largest absolute values of this rank's main weights.

        Args:
            again: also what an update has measured.
        """
        is_measured = not again and self.is_as_updated
        self._is_encoded = is_measured and self.codec.has_history
        if is_measured:
            return
        self._forget_update()
        for piece, main, _ in self._parts:
            self.codec.raise_amax(self._amax[piece.weight], main, piece)

    def reduce_maxima(self, amax: torch.Tensor, *, in_tensor_group: bool) -> None:
        """Reduce what each rank found to the maxima over all that hold parts of the main weight. Ranks: these.

        Args:
            in_tensor_group: over tensor-parallel ranks too, which hold parts of a weight under one name.
        """
        for axis in self.scale_axes:
            axis.maximum(amax)
        mesh = self.group_mesh.tensor_mesh
        if in_tensor_group and mesh is not None and mesh.size(0) > 1:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=mesh.get_group(0))

    @property
    def scale_axes(self) -> list[Transport]:
        """The transports of the axes over which main weights are cut."""
        placed = zip(self.placements.optimizer, self.group_mesh.axes, strict=True)
        return [axis for placement, axis in placed if placement.is_shard() and axis.size > 1]

    def restart_scales(self) -> None:
        """Take the scales of the weights as they were just measured, and begin their history with them."""
        scales = self.scales
        self._to_restore.clear()
        amax = self.codec.used_scales(scales.amax)
        self.codec.used_scales(scales.scale).copy_(self.codec.first_scale(amax))
        if self.codec.has_history:
            scales.history.zero_()
            scales.history[0] = amax

    def note_load(self) -> None:
        super().note_load()
        self._forget_scales()

    def _forget_scales(self) -> None:
        """Start again with the next weights, which are not those that the scales were made for."""
        self._to_restore = set(range(len(self.layout.slots)))
        self._forget_update()
        self.has_following = False

    def _forget_update(self) -> None:
        if self.was_updated:
            self.scales.amax.zero_()
            self.was_updated = False

    def scale_state(self, index: int) -> dict[str, torch.Tensor] | None:
        """Return what a checkpoint must hold of a weight's scales; None where the weights say it all."""
        if self.restarts or not self.codec.has_history:
            return None
        # The scale of bytes that an update has written, and no forward has read yet.
        scales = self._following if self.was_updated else self._scale
        return {"scale": scales[index], "amax_history": self.scales.history[:, index]}

    def restore_scales(self, index: int, state: Mapping[str, torch.Tensor] | None) -> None:
        """Take over what ``scale_state`` returned, after ``note_load``; a shorter history takes the latest steps."""
        if state is None or "amax_history" not in state or not self.codec.has_history:
            return
        history, saved = self.scales.history[:, index], state["amax_history"]
        kept = min(len(history), len(saved))
        self._scale[index].copy_(state["scale"])
        history.zero_()
        history[:kept].copy_(saved[:kept])
        self._to_restore.discard(index)

    def sync(self, *, casts: bool = True) -> None:
        """Encode the main weight again, with scales that fit. Ranks: all that hold parts of the context's weights."""
        scales = self._context_scales()
        assert scales is not None, "a context lives as long as its units"
        scales.prepare()
        if casts or not self._is_encoded:
            for piece, main, target in self._parts:
                self.codec.write(target, main, self._scale[piece.weight], piece, nominal=self.dtypes.compute)
        self._is_encoded = False
        self._drop_derived()
        super().sync(casts=False)

    @property
    def syncs_jointly(self) -> bool:
        return True

    # ---- the full weight ----------------------------------------------------------------------------------------

    def wrap(self, index: int) -> torch.Tensor:
        return self.codec.wrapper.wrap(
            self.full.view(index), self._inverse[index], codec=self.codec, dtype=self.dtypes.compute
        )

    def release(self, *, poisons: bool) -> None:
        super().release(poisons=poisons)
        if not self.codec.keeps_derived:
            self._drop_derived()

    def end_use(self) -> None:
        if self._is_cut and not self.codec.keeps_derived:
            self._drop_derived()

    def _drop_derived(self) -> None:
        """Drop what layers have made of bytes that are gone or new."""
        for name, value in self.codec.wrapper.derived.items():
            each(setattr, self.unsharded, repeat(name), repeat(value))

    def _rebind(self, index: int, parameter: torch.Tensor) -> None:
        self.codec.wrapper.rebind(parameter, data=self.full.view(index))
        self._drop_derived()


# ---- scales of a context --------------------------------------------------------------------------------------------


class WeightScales:
    """Measures main weights, reduces what each rank found, and computes scales: once for all groups of a context.

    The first all-gather of a weight version does it, on the gather stream, before any group is encoded: every rank comes
    to it at the same place. Where an update has written the bytes, with scales that were known before it, that gather waits
    only for its own unit's update; what the update measured is reduced before the next update, which needs the next
    scales. Groups that share codec and ranks are a batch, whose scales lie in one vector.
    """

    def __init__(self, unsharder: Unsharder) -> None:
        self.unsharder = unsharder
        self._members: list[weakref.ref[ScaledWeights]] = []
        self._batches: list[_Batch] = []
        self._batched: list[int] = []  # ids of the weights in batches
        self._version = -1

    def add(self, weights: ScaledWeights) -> None:
        """Serve these weights too."""
        weights.join(self)
        self._members.append(weakref.ref(weights))
        self._version, self._batches, self._batched = -1, [], []

    def clear(self) -> None:
        """Forget all groups, which another context will serve."""
        self._members, self._batches, self._batched = [], [], []

    def prepare(self) -> None:
        """Bring all scales up to date with the main weights. Ranks: all that hold parts of them."""
        if self._version == self.unsharder.state.weight_version:
            return
        self._version = self.unsharder.state.weight_version
        members = [weights for ref in self._members if (weights := ref()) is not None and weights.follows_main]
        keys = list(map(id, members))
        if keys != self._batched:
            kinds: dict[tuple[Any, ...], list[ScaledWeights]] = {}
            for weights in members:
                ranks = tuple(tuple(axis.ranks) for axis in weights.scale_axes)
                kinds.setdefault((weights.codec, ranks, weights.dtypes.compute), []).append(weights)
            self._batched, self._batches = keys, list(map(_Batch, kinds.values()))
        for batch in self._batches:
            batch.prepare()

    def prepare_update(self) -> None:
        """Compute the scales with which the coming update writes bytes. Ranks: all that hold parts of the weights."""
        for batch in self._batches:
            batch.reduce_measured()

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
        # This version's bytes are those that an update wrote, whose maxima are not reduced yet (``reads_update`` of its members remains
        # set after that); and a version ever was such a one.
        self._has_unreduced_maxima = self._has_read_update = False

    @property
    def members(self) -> list[ScaledWeights]:
        """The groups that still exist."""
        return [weights for ref in self._members if (weights := ref()) is not None]

    def prepare(self) -> None:
        """Bring the scales up to date for a weight version. Ranks: all that hold parts of the weights."""
        members = self.members
        # Not for a second weight version since the update: other code may have written the weights.
        is_second = self._has_unreduced_maxima
        reads_update = self._codec.has_history and not is_second and all(weights.was_updated for weights in members)
        for weights in members:
            weights.begin_version(reads_update=reads_update)
        self.reduce_measured()
        if reads_update:
            self._has_unreduced_maxima = self._has_read_update = True
            scales = self._scales
            self._codec.used_scales(scales.scale).copy_(self._codec.used_scales(scales.following))
            torch.reciprocal(scales.scale, out=scales.inverse)
            for weights in members:
                weights.measure(again=False)
        else:
            self._refresh(members)

    def reduce_measured(self) -> None:
        """Reduce what the latest update measured and compute the scales of the next, if that has not been done."""
        is_due, self._has_unreduced_maxima = self._has_unreduced_maxima, False
        members = self.members
        if is_due and all(weights.has_following for weights in members):  # nothing was loaded since
            amax, _ = self._reduced(members)
            self._remember(amax)
            self._look_ahead(amax, members)

    def restore_update(self) -> None:
        """Restore the post-update state that a captured step expects at its start, if forwards have only read what an update wrote."""
        self._has_unreduced_maxima = False
        members = self.members
        if self._has_read_update and not all(weights.was_updated for weights in members):
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
            weights.measure(again=is_captured)
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
        """Compute the scales that follow, and start to measure again."""
        codec, scales = self._codec, self._scales
        if codec.has_history:
            scale = codec.next_scale(amax, codec.used_scales(scales.scale), scales.history)
            codec.used_scales(scales.following).copy_(scale)
        scales.amax.zero_()
        for weights in members:
            weights.expect_update()
