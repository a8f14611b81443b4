"""Who decides how much padding the layout of a unit may have."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PaddingPolicy:
    """What padding is accepted, and for what.

    Padding is what segments of equal size, cut between granules, leave empty. Every rank pays for it in memory and
    traffic, so the budget is small; fewer buffers (fewer collectives) and whole rows (simpler DTensors) are worth that
    much and no more. [Note: what rows cost].
    """

    alignment: int = 64
    """Elements that starts and segments are a multiple of: 128 bytes of bf16, which vectorised kernels and copies like."""

    alignment_worth: float = 1.01
    """A smaller alignment is taken where a buffer would be larger than this factor without it: starts that are not
    aligned cost less than 1 % of all traffic."""

    max_fraction: float = 0.02
    """Padding elements for each used one, over all buffers of the tensors together: the budget of the design."""

    least_numel_to_cut: int = 2**20
    """Tensors of fewer elements together keep whole rows whatever that costs: what they lose is a megabyte or two."""

    def allowed(self, used_numel: int, num_tensors: int, num_ranks: int) -> float:
        """Return the padding elements that tensors of ``used_numel`` elements may have together.

        The alignment of each tensor, and two of each rank, is always allowed, so that tiny units stay in one buffer.
        """
        return max(self.max_fraction * used_numel, self.alignment * (2 * num_ranks + num_tensors))
