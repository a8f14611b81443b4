"""Arithmetic of weights that are scaled before they are rounded to bytes, tensor by tensor or block by block."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch

from megatron.core.distributed.fsdp.buffers.weight_codec import WeightCodec
from megatron.core.distributed.fsdp.codec import float8
from megatron.core.distributed.fsdp.codec.float8 import SCALE_ALIGNMENT
from megatron.core.distributed.fsdp.config.torch_versions import HAS_TRITON
from megatron.core.distributed.fsdp.layout.flat_layout import FlatLayout

Fp8Recipe = Literal["delayed", "tensorwise", "blockwise"]
_SCALE_COLUMNS = 4  # GEMMs of blocks read scales in rows of a multiple of this


class Fp8Wrapper(Protocol):
    """Makes what a layer multiplies of gathered bytes. Compares by value, since it is part of a codec."""

    @property
    def derived(self) -> Mapping[str, Any]:
        """Attributes of what ``wrap`` returns that hold something made of the bytes, such as their transpose.

        The values are those that say that there is none.
        """

    def wrap(self, data: torch.Tensor, inverse: torch.Tensor, *, codec: Any, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor [R, C] of nominal ``dtype`` over the bytes ``data`` [R, C] and the reciprocals of their scales.

        ``codec`` is the ``Fp8Codec``. ``inverse`` is [1], or [block rows, block columns] where the recipe scales blocks. Both are written in place later.
        """

    def rebind(
        self, wrapped: torch.Tensor, *, data: torch.Tensor | None = None, inverse: torch.Tensor | None = None
    ) -> None:
        """Make the tensor one over these bytes, or these scales, or both."""


@dataclass(frozen=True, kw_only=True)
class ScalingCodec(WeightCodec):
    """Settings and arithmetic of an ``Fp8Codec``, which has what the settings mean."""

    recipe: Fp8Recipe
    wrapper: Fp8Wrapper
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    power_of_two: bool | None = None
    keeps_derived: bool = False

    casts = False
    nan = float8.NAN_BYTE

    def __post_init__(self) -> None:
        for name, given, served in (
            ("recipe", self.recipe, get_args(Fp8Recipe)),
            ("amax_compute_algo", self.amax_compute_algo, ("max", "most_recent")),
        ):
            if given not in served:
                raise ValueError(f"{name} of an Fp8Codec must be one of {', '.join(served)}, got {given!r}")
        if self.amax_history_len < 1 or self.margin < 0:
            raise ValueError(
                "an Fp8Codec needs a history of 1 step or more and a margin of 0 or more, got "
                f"amax_history_len={self.amax_history_len} and margin={self.margin}"
            )

    @property
    def scales_blocks(self) -> bool:
        """Whether each block of a weight has a scale."""
        return self.recipe == "blockwise"

    @property
    def encodes_by_tensor(self) -> bool:  # type: ignore[override]
        return not self.scales_blocks

    @property
    def has_history(self) -> bool:
        """Whether scales depend on more than the weights as they are: a checkpoint must hold them."""
        return self.recipe == "delayed"

    def rest_dtype(self, compute: torch.dtype) -> torch.dtype:
        return torch.uint8

    def check(self, parameter: torch.Tensor, name: str) -> None:
        if parameter.dim() != 2:
            raise ValueError(
                f"a weight with an Fp8Codec must be a matrix, got {name} of shape {list(parameter.shape)}; leave its "
                "fsdp_codec out"
            )

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the scales of a weight [R, C]: [1], or [block rows, block columns rounded up to 4]."""
        if not self.scales_blocks:
            return (1,)
        rows, columns = (-(-length // float8.BLOCK) for length in shape)
        return rows, -(-columns // _SCALE_COLUMNS) * _SCALE_COLUMNS

    def num_scales(self, layout: FlatLayout) -> int:
        """Count the scales of all weights of a layout, each weight's rounded up to ``SCALE_ALIGNMENT``."""
        return sum(_aligned(self.scale_shape(slot.shape)) for slot in layout.slots)

    def scales_by_weight(self, flat: torch.Tensor, layout: FlatLayout) -> list[torch.Tensor]:
        """Return views of ``flat`` [num_scales]: [T] one for each weight, of its scales' shape."""
        shapes = [self.scale_shape(slot.shape) for slot in layout.slots]
        parts = flat.split([_aligned(shape) for shape in shapes])
        return [part[: math.prod(shape)].view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def used_scales(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a view of ``flat`` [num_scales] without what is only there for alignment, [T] where weights have one each."""
        return flat if self.scales_blocks else flat.view(-1, SCALE_ALIGNMENT)[:, 0]

    # ---- scales -------------------------------------------------------------------------------------------------

    def next_scale(self, amax: torch.Tensor, former: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
        """Return the scales [N] of the next bytes; ``history`` [amax_history_len, N] has the latest step first."""
        if not self.has_history:
            return float8.current_scale(amax, power_of_two=self.scales_by_powers_of_two)
        earlier = history.amax(0) if self.amax_compute_algo == "max" else history[0]
        return float8.delayed_scale(earlier, former, margin=self.margin)

    def first_scale(self, amax: torch.Tensor) -> torch.Tensor:
        """Return the scales [N] of weights that have no history."""
        return self.next_scale(amax, torch.ones_like(amax), amax.unsqueeze(0))

    @property
    def scales_by_powers_of_two(self) -> bool:
        """Whether scales are powers of two."""
        return self.scales_blocks if self.power_of_two is None else self.power_of_two

    # ---- pieces of weights --------------------------------------------------------------------------------------

    def raise_amax(self, amax: torch.Tensor, weights: torch.Tensor, piece: Piece) -> None:
        """Raise ``amax``, of the shape of a weight's scales, to what a piece of the weight holds."""
        if self.scales_blocks:
            functions = _kernels_for(weights, piece.width) or float8
            functions.raise_block_amax(amax, weights, piece.first, piece.width)
        else:
            float8.raise_amax(amax, weights)

    def write(
        self, target: torch.Tensor, weights: torch.Tensor, scale: torch.Tensor, piece: Piece, *, nominal: torch.dtype
    ) -> None:
        """Write a piece of a weight, rounded to the nominal dtype, as bytes to ``target``, with the weight's scales."""
        kernels = _kernels_for(weights, piece.width if self.scales_blocks else float8.BLOCK)
        if kernels is not None and (nominal == torch.bfloat16 or nominal == weights.dtype):
            rounds = nominal != weights.dtype
            kernels.write(
                target, weights, scale, piece.first, piece.width, scales_blocks=self.scales_blocks, rounds=rounds
            )
        elif self.scales_blocks:
            float8.write_block_bytes(target, weights.to(nominal), scale, piece.first, piece.width)
        else:
            float8.write_bytes(target, weights.to(nominal), scale)

    def read(self, data: torch.Tensor, inverse: torch.Tensor, piece: Piece, *, dtype: torch.dtype) -> torch.Tensor:
        """Return the values [N] of a piece's bytes, with the reciprocals of the weight's scales."""
        if self.scales_blocks:
            return float8.read_block_bytes(data, inverse, piece.first, piece.width, dtype)
        return float8.read_bytes(data, inverse, dtype)


def _kernels_for(weights: torch.Tensor, width: int) -> Any:
    """Return the module of kernels, if they can serve weights of this width; it matters only where blocks are scaled."""
    if not (HAS_TRITON and weights.is_cuda and width % float8.BLOCK == 0):
        return None
    from megatron.core.distributed.fsdp.codec import float8_kernel  # it imports Triton

    return float8_kernel


def _aligned(shape: Sequence[int]) -> int:
    return -(-math.prod(shape) // SCALE_ALIGNMENT) * SCALE_ALIGNMENT


class Piece(NamedTuple):
    """A stretch of a flat buffer that holds elements of one weight.

    Args:
        weight: its index.
        first: its first element here, of the flattened weight.
        width: elements of its rows.
        begin, end: where the elements lie in the buffer's local part.
    """

    weight: int
    first: int
    width: int
    begin: int
    end: int


def pieces_of(layout: FlatLayout, begin: int, end: int) -> list[Piece]:
    """Return the stretches of weights in elements [begin, end) of the full buffer; pure."""
    found = []
    for index, slot in enumerate(layout.slots):
        low, high = max(begin, slot.start), min(end, slot.start + slot.numel)
        if low < high:
            found.append(Piece(index, low - slot.start, slot.shape[-1], low - begin, high - begin))
    return found
