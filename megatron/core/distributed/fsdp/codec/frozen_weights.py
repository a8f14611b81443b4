"""Frozen weights that rest only in bytes and scales, without a main weight: values are computed when somebody reads them.

What modules hold of such a weight is a DTensor whose local tensor is a ``FrozenWeight``. An operation that reads it gets its
values; an operation that writes to it makes values of the whole buffer, which stay until the engine has encoded them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.utils import _pytree as pytree

from megatron.core.distributed.fsdp.buffers.flat_buffer import FlatBuffer
from megatron.core.distributed.fsdp.codec.scaled_weights import ScaledWeights, Scales
from megatron.core.distributed.fsdp.codec.scaling import ScalingCodec, pieces_of
from megatron.core.distributed.fsdp.config.mixed_precision import GroupDtypes

_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class RestingBytes(FlatBuffer):
    """This rank's bytes of a group of weights as its main weight: values are computed when they are asked for.

    Args:
        like: the main weight in whose place this is.
        codec: of the weights.
        data: [N] the bytes.
        dtype: of the values.
        inverse: [T] reciprocals of each weight's scales.

    Attributes:
        exposed: weights whose values somebody may have written. The same on all ranks.
    """

    def __init__(
        self,
        like: FlatBuffer,
        codec: ScalingCodec,
        data: torch.Tensor,
        dtype: torch.dtype,
        inverse: Sequence[torch.Tensor],
    ) -> None:
        self._codec, self.data, self.dtype, self.inverse = codec, data, dtype, inverse
        self.pieces = {piece.weight: piece for piece in pieces_of(like.layout, like.begin, like.end)}
        self.exposed: set[int] = set()
        self._values: torch.Tensor | None = None
        self._begun = self._noted = self._passed = 0
        super().__init__(like.layout, like.placements, like.axes, data)

    @property
    def local(self) -> torch.Tensor:
        """[N] the values, which are kept from now on until they are dropped; writes to them are noticed."""
        if self._values is None:
            self._values = self.read_all(self.dtype)
            self._begun = self._values._version
        return self._values

    @local.setter
    def local(self, value: torch.Tensor) -> None:
        assert value is self.data, "values are those of the bytes"

    @property
    def local_nbytes(self) -> int:
        return super().local_nbytes if self.has_values else 0

    def view(self, index: int) -> FrozenWeight:
        shape = self.place_of(index)[1]
        return FrozenWeight(shape, self.dtype, self.data.device, lambda: self.read(index).view(shape), (self, index))

    @property
    def has_values(self) -> bool:
        return self._values is not None

    @property
    def _version(self) -> int:
        """Grows with each write, and never shrinks: the name under which tensors count theirs."""
        written = 0 if self._values is None else self._values._version - self._begun
        return self._passed + self._noted + written

    @property
    def is_written(self) -> bool:
        return self._version != self._passed

    def note_write(self) -> None:
        """Note a write to the values that no version counter has seen."""
        self._noted += 1

    def drop(self) -> None:
        """Forget the values: what was written is encoded."""
        self._passed = self._version
        self._values, self._noted = None, 0
        self.exposed.clear()

    def read_all(self, dtype: torch.dtype) -> torch.Tensor:
        """Return [N] the values in another dtype: rounded once, where they were not written meanwhile."""
        made = torch.zeros(self.data.numel(), dtype=dtype, device=self.data.device)
        for index, piece in self.pieces.items():
            made[piece.begin : piece.end].copy_(self.read(index, dtype))
        return made

    def read(self, index: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the elements of weight ``index`` that lie here, flat; not to be written."""
        dtype, piece = dtype or self.dtype, self.pieces.get(index)
        if piece is None:
            return torch.empty(0, dtype=dtype, device=self.data.device)
        if self._values is not None and index in self.exposed:
            return self._values[piece.begin : piece.end].to(dtype)
        return self._codec.read(self.data[piece.begin : piece.end], self.inverse[index], piece, dtype=dtype)

    def expose(self, index: int) -> torch.Tensor:
        """Return memory of what lies here of weight ``index``, flat, that may be written. Ranks: all, with the same arguments."""
        self.exposed.add(index)
        piece = self.pieces.get(index)
        return self.local[piece.begin : piece.end] if piece is not None else self.local[:0]


class FrozenWeight(torch.Tensor):
    """This rank's part of a frozen weight, or a view of one, which can only be read.

    Args:
        shape: of the part.
        read: returns its values.
        whole: the buffer and index of the weight, which may be written; None for a view.
    """

    _read: Callable[[], torch.Tensor]
    _whole: tuple[RestingBytes, int] | None

    @staticmethod
    def __new__(
        cls: Any,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        read: Callable[[], torch.Tensor],
        whole: tuple[RestingBytes, int] | None = None,
    ) -> FrozenWeight:
        made: FrozenWeight = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=device)
        made._read, made._whole = read, whole
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def fsdp_memory(self) -> torch.Tensor:
        """Return plain memory that may be written. Ranks: all, with the same arguments."""
        if self._whole is None:
            raise RuntimeError(
                "a view of a frozen weight that rests in bytes must not be written, got a write in place: it would be lost; write to "
                "the whole parameter (copy_, add_, load_state_dict), or unfreeze it first (requires_grad_(True)) and run a forward"
            )
        resting, index = self._whole
        return resting.expose(index).view(self.shape)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        own = args[0] if args else None
        if isinstance(own, cls) and (
            function in _SAME
            or (
                function in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
                and list(args[1]) == list(own.shape)
            )
        ):
            return FrozenWeight(own.shape, own.dtype, own.device, own._read, own._whole)
        arguments = function._schema.arguments
        writes = {argument.name: bool(argument.alias_info and argument.alias_info.is_write) for argument in arguments}
        is_view = isinstance(own, cls) and bool(arguments[0].alias_info) and not writes[arguments[0].name]
        if is_view:
            return _view(function, own, args[1:], dict(kwargs or {}))
        written: list[FrozenWeight] = []

        def plain(value: Any, name: str) -> Any:
            def of_one(tensor: Any) -> Any:
                if not isinstance(tensor, cls):
                    return tensor
                if writes[name]:
                    written.append(tensor)
                    return tensor.fsdp_memory()
                return tensor._read()

            return pytree.tree_map(of_one, value)

        names = [argument.name for argument in arguments]
        given = [plain(value, name) for value, name in zip(args, names, strict=False)]
        named = {name: plain(value, name) for name, value in (kwargs or {}).items()}
        result = function(*given, **named)
        for tensor in written:
            tensor._whole[0].note_write()  # type: ignore[index]
        return written[0] if len(written) == 1 and isinstance(result, torch.Tensor) else result


def _view(function: Any, own: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return views of the values that are computed when they are read."""
    shapes = function(torch.empty(own.shape, dtype=own.dtype, device="meta"), *args, **kwargs)

    def lazy(shape: torch.Tensor, pick: Callable[[Any], torch.Tensor]) -> FrozenWeight:
        return FrozenWeight(shape.shape, own.dtype, own.device, lambda: pick(function(own._read(), *args, **kwargs)))

    if isinstance(shapes, torch.Tensor):
        return lazy(shapes, lambda made: made)
    return [lazy(shape, lambda made, at=at: made[at]) for at, shape in enumerate(shapes)]  # type: ignore[misc]


class FrozenWeights(ScaledWeights):
    """As ``ScaledWeights``, without a main weight. [Note: frozen bytes].

    Weights are encoded when they are sharded, and again when they were written, by reductions of their own. Writes must be
    the same on all ranks, as those that load or merge whole weights are.
    """

    follows_main = False
    main: RestingBytes

    def __init__(self, originals: Sequence[torch.Tensor], **settings: Any) -> None:
        self._given_inverse = [vars(original).pop("fsdp_inverse", None) for original in originals]
        super().__init__(originals, **settings)

    def _follow_main(self) -> None:
        super()._follow_main()
        piece = self.encoded_piece
        assert piece is not None
        self._take_inverse()
        self._encode_weights(range(len(self.layout.slots)))
        self.main = RestingBytes(self.main, self.codec, piece, self.dtypes.main_params, self._inverse)
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
        if isinstance(self.main, RestingBytes):
            self.main.inverse = self._inverse

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
        self._to_restore = set(range(len(self.layout.slots)))  # what is written later has scales of its own

    def sync(self, *, casts: bool = True) -> None:
        """Encode what was written. Ranks: all that hold parts of the group's weights, if it was."""
        resting = self.main
        if resting.is_written:
            values, data = resting.local, resting.data
            self._parts = [
                (piece, values[piece.begin : piece.end], data[piece.begin : piece.end])
                for piece in resting.pieces.values()
            ]
            self._encode_weights(sorted(resting.exposed))
            self._parts = []
            self._drop_derived()
        resting.drop()

    def set_parameters(self, sharded: Sequence[nn.Parameter], unsharded: Sequence[nn.Parameter]) -> None:
        super().set_parameters(sharded, unsharded)
        self.freshness.count_writes_to([*self.freshness.tensors, self.main])

    def note_load(self) -> None:
        super().note_load()
        self.main.note_write()

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
        if is_part or (index in self.main.exposed and self.main.is_written):
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
        local = self.main.read_all(dtypes.main_params)
        self.main.drop()
        self.__class__ = ScaledWeights  # type: ignore[assignment]
        self.main = self._buffer(self.placements.optimizer, local)  # type: ignore[assignment]
        self._to_restore = set()
        self._follow_main()
        self.freshness.outdate()
        return True
