"""Adam's moments in fewer bits: their dtypes, scales and rounding, in torch operations; ``adamw_kernel`` computes the same.

bf16 has the range of fp32 and needs no scale. In fp16 and in 8 bits (E4M3) each *piece* has one: the elements that a tensor has in
one block of ``BLOCK_NUMEL`` elements of this rank's flat shard. Scales are powers of two, so rounding an element does not depend on
its piece, unless it is tens of thousands of times smaller than the piece's largest one. So the number of ranks, which decides where pieces begin,
changes nothing else. See [Note: moments in fewer bits] for why a scale does not belong to a whole parameter, as in transformer-engine.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import pad

from megatron.core.distributed.fsdp.codec.float8 import E4M3_MAX
from megatron.core.distributed.fsdp.flat_optimizer.flat_runs import Run

BLOCK_NUMEL = 1024
"""Elements of a block, which one program of the kernel updates."""

LEAST_EXPONENT = 32
"""Least biased exponent of a scale: scaled or not, no moment is below the normal numbers of fp32, which some devices flush to 0."""


class ScaledFormat(NamedTuple):
    """The numbers that scaled moments are rounded to: the exponent of the largest one, and the smallest positive one."""

    top: int
    smallest: float


SCALED_FORMATS = {torch.float16: ScaledFormat(15, 2.0**-24), torch.uint8: ScaledFormat(8, 2.0**-9)}
MOMENT_DTYPES = (torch.float32, torch.bfloat16, *SCALED_FORMATS)
"""``torch.uint8`` stands for E4M3, as in transformer-engine."""


def make_scales(stored: torch.Tensor, num_tensors: int) -> torch.Tensor | None:
    """Return the scales [S] fp32 of the zeros ``stored`` [N]; None if their dtype has no scales."""
    if stored.dtype not in SCALED_FORMATS:
        return None
    # Each block has a piece, and one more for each tensor that begins within it.
    num_scales = -(-stored.numel() // BLOCK_NUMEL) + num_tensors
    return torch.ones(num_scales, dtype=torch.float32, device=stored.device)


def read_moment(stored: torch.Tensor, scales: torch.Tensor | None, run: Run) -> torch.Tensor:
    """Return the run's elements of a moment in fp32: a view where they are stored so."""
    own = stored[run.begin : run.end]
    if scales is None:
        return own.float()
    values = own.view(torch.float8_e4m3fn).float() if own.dtype == torch.uint8 else own.float()
    return values.mul_(_by_element(scales[_pieces(run)], run))


def write_moment(
    stored: torch.Tensor, scales: torch.Tensor | None, run: Run, values: torch.Tensor, *, is_square: bool
) -> None:
    """Round the run's elements, given in fp32, and store them with their scales.

    Args:
        is_square: what is above 0 is not rounded to 0, since updates divide by its root. Transformer-engine divides by eps then.
    """
    own = stored[run.begin : run.end]
    if scales is None:
        own.copy_(values)
        return
    top, smallest = SCALED_FORMATS[own.dtype]
    scales[_pieces(run)], inverse = _piece_scales(values, run, top)
    scaled = values * _by_element(inverse, run)
    if is_square:
        scaled = torch.where(scaled > 0, scaled.clamp(min=smallest), scaled)
    if own.dtype == torch.uint8:
        own.view(torch.float8_e4m3fn).copy_(scaled.clamp_(-E4M3_MAX, E4M3_MAX))
    else:
        own.copy_(scaled)


def _piece_scales(values: torch.Tensor, run: Run, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales of the run's pieces, and their inverses.

    A scale is the least power of two that brings the largest absolute value (NaN counts as infinite) to 1.75 * 2^top at most, which
    is 448 for E4M3.
    """
    sizes = torch.where(values.isnan(), torch.inf, values.abs())
    amax = pad(sizes, (run.begin % BLOCK_NUMEL, -run.end % BLOCK_NUMEL)).view(-1, BLOCK_NUMEL).amax(dim=1)
    # The sum has the next exponent where the mantissa is above 1.75.
    exponent = (((amax.view(torch.int32) + 0x1FFFFF) >> 23) - top).clamp_(min=LEAST_EXPONENT)
    return (exponent << 23).view(torch.float32), ((254 - exponent) << 23).view(torch.float32)


def _pieces(run: Run) -> slice:
    """Return where the scales of the run's pieces are: no two pieces of a shard have the same."""
    return slice(run.begin // BLOCK_NUMEL + run.place, (run.end - 1) // BLOCK_NUMEL + 1 + run.place)


def _by_element(scales: torch.Tensor, run: Run) -> torch.Tensor:
    first = run.begin % BLOCK_NUMEL
    return scales.repeat_interleave(BLOCK_NUMEL)[first : first + run.end - run.begin]
