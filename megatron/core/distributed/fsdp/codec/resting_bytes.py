"""Frozen weights that rest in bytes and scales alone: their values are computed when somebody reads them.

What modules hold of such a weight is a DTensor whose local tensor is a ``FrozenWeight``. An operation that reads it gets its
values; an operation that writes to it makes values of the whole buffer, which stay until the engine has encoded them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from megatron.core.distributed.fsdp.codec.scaling import Piece, ScalingCodec

_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class RestingBytes:
    """This rank's bytes of a group of weights, and their values while they are needed.

    Args:
        codec: of the weights.
        pieces: which elements of which weight lie where.
        data: [N] the bytes.
        dtype: of the values.

    Attributes:
        inverse: [T] reciprocals of each weight's scales.
        exposed: weights whose values somebody may have written. Alike on all ranks.
    """

    def __init__(self, codec: ScalingCodec, pieces: Sequence[Piece], data: torch.Tensor, dtype: torch.dtype) -> None:
        self._codec, self._pieces, self.data, self.dtype = codec, {piece.weight: piece for piece in pieces}, data, dtype
        self.inverse: Sequence[torch.Tensor] = ()
        self.exposed: set[int] = set()
        self._values: torch.Tensor | None = None
        self._begun = self._noted = self._passed = 0

    @property
    def has_values(self) -> bool:
        return self._values is not None

    @property
    def values(self) -> torch.Tensor:
        """[N] the values, which are kept from now on until they are dropped; writes to them are noticed."""
        if self._values is None:
            self._values = self.read_all(self.dtype)
            self._begun = self._values._version
        return self._values

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
        for index, piece in self._pieces.items():
            made[piece.begin : piece.end].copy_(self.read(index, dtype))
        return made

    def read(self, index: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the elements of weight ``index`` that lie here, flat; not to be written."""
        dtype, piece = dtype or self.dtype, self._pieces.get(index)
        if piece is None:
            return torch.empty(0, dtype=dtype, device=self.data.device)
        if self._values is not None and index in self.exposed:
            return self._values[piece.begin : piece.end].to(dtype)
        return self._codec.read(self.data[piece.begin : piece.end], self.inverse[index], piece, dtype=dtype)

    def expose(self, index: int) -> torch.Tensor:
        """Return memory of what lies here of weight ``index``, flat, that may be written. Ranks: all, with the same arguments."""
        self.exposed.add(index)
        piece = self._pieces.get(index)
        return self.values[piece.begin : piece.end] if piece is not None else self.values[:0]


class FrozenWeight(torch.Tensor):
    """This rank's part of a frozen weight, or a view of one, which can be read alone.

    Args:
        shape: of the part.
        read: returns its values.
        expose: returns memory of it that may be written, and notes it; None for a view.
        note_write: tells of writes.
    """

    _read: Callable[[], torch.Tensor]
    _expose: Callable[[], torch.Tensor] | None
    _note_write: Callable[[], None]

    @staticmethod
    def __new__(
        cls: Any,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        read: Callable[[], torch.Tensor],
        expose: Callable[[], torch.Tensor] | None = None,
        note_write: Callable[[], None] = lambda: None,
    ) -> FrozenWeight:
        made: FrozenWeight = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=device)
        made._read, made._expose, made._note_write = read, expose, note_write
        return made

    @staticmethod
    def of(resting: RestingBytes, index: int, shape: Sequence[int]) -> FrozenWeight:
        """Return the part of weight ``index`` that lies here."""
        return FrozenWeight(
            shape,
            resting.dtype,
            resting.data.device,
            lambda: resting.read(index).view(shape),
            lambda: resting.expose(index).view(shape),
            resting.note_write,
        )

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def fsdp_memory(self) -> torch.Tensor:
        """Return plain memory that may be written. Ranks: all, with the same arguments."""
        if self._expose is None:
            raise RuntimeError(
                "a view of a frozen weight that rests in bytes must not be written, got a write in place: it would be lost; write to "
                "the whole parameter (copy_, add_, load_state_dict), or unfreeze it first (requires_grad_(True)) and run a forward"
            )
        return self._expose()

    def _again(self) -> FrozenWeight:
        return FrozenWeight(self.shape, self.dtype, self.device, self._read, self._expose, self._note_write)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        own = args[0] if args else None
        if isinstance(own, cls) and (
            function in _SAME
            or (
                function in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
                and list(args[1]) == list(own.shape)
            )
        ):
            return own._again()
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
            tensor._note_write()
        return written[0] if len(written) == 1 and isinstance(result, torch.Tensor) else result


def _view(function: Any, own: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return views of the values that are computed when they are read."""
    shapes = function(torch.empty(own.shape, dtype=own.dtype, device="meta"), *args, **kwargs)

    def lazy(shape: torch.Tensor, pick: Callable[[Any], torch.Tensor]) -> FrozenWeight:
        return FrozenWeight(shape.shape, own.dtype, own.device, lambda: pick(function(own._read(), *args, **kwargs)))

    if isinstance(shapes, torch.Tensor):
        return lazy(shapes, lambda made: made)
    return [lazy(shape, lambda made, at=at: made[at]) for at, shape in enumerate(shapes)]  # type: ignore[misc]
