"""Weights in bytes of a group that was frozen when it was sharded: bytes and scales alone, no main weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate

from megatron.core.distributed.fsdp.buffers.flat_buffer import FlatBuffer
from megatron.core.distributed.fsdp.codec.resting_bytes import FrozenWeight, RestingBytes
from megatron.core.distributed.fsdp.codec.scaled_weights import ScaledWeights, Scales
from megatron.core.distributed.fsdp.codec.scaling import pieces_of
from megatron.core.distributed.fsdp.config.mixed_precision import GroupDtypes


class _ValuesOfBytes(FlatBuffer):
    """The main weight that bytes stand for: computed when it is asked for, and then kept until ``resting`` drops it."""

    def __init__(self, like: FlatBuffer, resting: RestingBytes) -> None:
        self.resting = resting
        super().__init__(like.layout, like.placements, like.axes, resting.data)

    @property
    def local(self) -> torch.Tensor:
        return self.resting.values

    @local.setter
    def local(self, value: torch.Tensor) -> None:
        assert value is self.resting.data, "values are those of the bytes"

    @property
    def local_nbytes(self) -> int:
        return super().local_nbytes if self.resting.has_values else 0

    def view(self, index: int) -> torch.Tensor:
        return FrozenWeight.of(self.resting, index, self.place_of(index)[1])


class FrozenWeights(ScaledWeights):
    """As ``ScaledWeights``, without a main weight. [Note: frozen bytes].

    Weights are encoded when they are sharded, and again when they were written, by reductions of their own. Writes must be
    alike on all ranks, as those that load or merge whole weights are.
    """

    follows_main = False
    main: _ValuesOfBytes

    def __init__(self, originals: Sequence[torch.Tensor], **settings: Any) -> None:
        self._given_inverse = [vars(original).pop("fsdp_inverse", None) for original in originals]
        super().__init__(originals, **settings)

    def _follow_main(self) -> None:
        super()._follow_main()
        piece = self.encoded_piece
        assert piece is not None
        self._take_inverse()
        self._encode_weights(range(len(self.layout.slots)))
        pieces = pieces_of(self.layout, self.main.begin, self.main.end)
        self._resting = RestingBytes(self.codec, pieces, piece, self.dtypes.main_params)
        self._resting.inverse = self._inverse
        self.main = _ValuesOfBytes(self.main, self._resting)
        self._parts = []

    def _take_inverse(self) -> None:
        """Take the scales of weights that came as bytes, the first rank's. Ranks: all of the mesh."""
        given, self._given_inverse = self._given_inverse, []
        for index, inverse in enumerate(given):
            if inverse is not None and inverse.shape == self._inverse[index].shape:
                self._inverse[index].copy_(inverse)
                for axis in self.group_mesh.axes:
                    axis.broadcast(self._inverse[index])
                self._scale[index].copy_(self._inverse[index].reciprocal())
                self._to_restore.discard(index)

    def take_scales(self, scales: Scales) -> None:
        super().take_scales(scales)
        if hasattr(self, "_resting"):
            self._resting.inverse = self._inverse

    # ---- main to model weight -----------------------------------------------------------------------------------

    def _encode_weights(self, indices: Sequence[int]) -> None:
        """Encode these weights with the scales that were loaded with them, else with their own. Ranks: all that hold parts."""
        scales, codec = self.scales, self.codec
        parts = [part for part in self._parts if part[0].weight in set(indices)]
        for piece, values, _ in parts:
            codec.raise_amax(self._amax[piece.weight], values, piece)
        self.reduce_maxima(scales.amax, in_tensor_group=not codec.scales_blocks)
        scales.amax.copy_(scales.amax.to(self.dtypes.compute))
        for index in indices:
            if index in self._to_restore:
                self._scale[index].copy_(codec.first_scale(self._amax[index]))
                if codec.has_history:
                    scales.history[:, index] = 0.0
                    scales.history[0, index] = self._amax[index][0]
                torch.reciprocal(self._scale[index], out=self._inverse[index])
        for piece, values, target in parts:
            codec.write(target, values, self._scale[piece.weight], piece, nominal=self.dtypes.compute)
        scales.amax.zero_()
        self.restarts = False
        self._to_restore = set(range(len(self.layout.slots)))  # what is written later has scales of its own

    def sync(self, *, casts: bool = True) -> None:
        """Encode what was written. Ranks: all that hold parts of the group's weights, if it was."""
        resting = self._resting
        if resting.is_written:
            values, data = resting.values, resting.data
            self._parts = [
                (piece, values[piece.begin : piece.end], data[piece.begin : piece.end])
                for piece in pieces_of(self.layout, self.main.begin, self.main.end)
            ]
            self._encode_weights(sorted(resting.exposed))
            self._parts = []
            self._drop_derived()
        resting.drop()

    def set_parameters(self, sharded: Sequence[nn.Parameter], unsharded: Sequence[nn.Parameter]) -> None:
        super().set_parameters(sharded, unsharded)
        self.freshness.count_writes_to([*self.freshness.tensors, self._resting])

    def note_load(self) -> None:
        super().note_load()
        self._resting.note_write()

    def broadcast_replicas(self) -> None:
        self.sync()
        for placement, axis in zip(self.main.placements, self.group_mesh.axes, strict=True):
            if isinstance(placement, Replicate):
                for tensor in (self.model.local, *vars(self.scales).values()):
                    if tensor.numel():
                        axis.broadcast(tensor)

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def scale_state(self, index: int) -> dict[str, torch.Tensor] | None:
        """As ``ScaledWeights``: with its scales the values that the bytes stand for become the same bytes again."""
        is_part = self.codec.scales_blocks and (self.group_mesh.tensor_size or 1) > 1
        if is_part or (index in self._resting.exposed and self._resting.is_written):
            return None
        return {"scale_of_bytes": self._scale[index], "inverse_of_bytes": self._inverse[index]}

    def restore_scales(self, index: int, state: Mapping[str, torch.Tensor] | None) -> None:
        if state is None or "scale_of_bytes" not in state or state["scale_of_bytes"].shape != self._scale[index].shape:
            return
        self._scale[index].copy_(state["scale_of_bytes"])
        self._inverse[index].copy_(state["inverse_of_bytes"])
        self._to_restore.discard(index)

    # ---- once they are trained ----------------------------------------------------------------------------------

    def widen_main(self, dtypes: GroupDtypes) -> bool:
        """Make main weights of the bytes, and be as weights that were trained from the start."""
        self.dtypes = dtypes
        local = self._resting.read_all(dtypes.main_params)
        self._resting.drop()
        self.__class__ = ScaledWeights  # type: ignore[assignment]
        del self._resting
        self.main = self._buffer(self.placements.optimizer, local)  # type: ignore[assignment]
        self._to_restore = set()
        self._follow_main()
        self.freshness.outdate()
        return True
