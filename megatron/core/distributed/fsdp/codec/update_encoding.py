"""What an optimizer does for scaled weights while it has them at hand: it measures them, and may write their bytes.

See [Note: updates that encode].
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron.core.distributed.fsdp.codec import float8

# Scales of a weight begin at multiples of 256 bytes: cuBLAS refuses products whose scales lie anywhere.
SCALE_ALIGNMENT = 64


class UpdateEncoding(NamedTuple):
    """Where an update of a group's main weights writes the rest, for weights with one scale each.

    Args:
        target: [N] bytes, one for each main weight of this rank; None where scales depend on all updated weights.
        scale, amax: those of weight t at ``t * SCALE_ALIGNMENT``. The update raises ``amax``.
        nominal: dtype to which main weights are rounded before they are scaled.
    """

    target: torch.Tensor | None
    scale: torch.Tensor
    amax: torch.Tensor
    nominal: torch.dtype

    def encode(self, main: torch.Tensor, weight: int, begin: int, end: int) -> None:
        """Measure and write elements [begin, end), all of one weight, from the updated main weights ``main`` [N]."""
        values, at = main[begin:end], slice(weight * SCALE_ALIGNMENT, weight * SCALE_ALIGNMENT + 1)
        raise_amax(self.amax[at], values)
        if self.target is not None:
            float8.write_bytes(self.target[begin:end], values.to(self.nominal), self.scale[at])


def raise_amax(amax: torch.Tensor, weights: torch.Tensor) -> None:
    """Raise ``amax`` [1] to the largest absolute value of ``weights``."""
    amax.copy_(torch.maximum(amax, torch.linalg.vector_norm(weights, torch.inf, dtype=torch.float32)))
