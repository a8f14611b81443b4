"""Launches the Triton kernels of FP8 weights, where Triton can run them."""

from __future__ import annotations

import functools
import importlib.util

import torch

from megatron.core.distributed.fsdp.codec import float8


class Kernels:
    """``float8``'s functions on pieces of weights, by Triton kernels."""

    def __init__(self) -> None:
        from megatron.core.distributed.fsdp.codec import float8_kernel

        self._kernels = float8_kernel
        self._options = {"BLOCK": float8_kernel.NUMEL, "num_warps": float8_kernel.NUM_WARPS, "enable_fp_fusion": False}

    def raise_block_amax(self, amax: torch.Tensor, weights: torch.Tensor, first: int, width: int) -> None:
        """As ``float8.raise_block_amax``; NaN counts as infinite."""
        numel = weights.numel()
        arguments = (weights, amax, first, numel, width, amax.shape[1])
        self._kernels.amax_kernel[self._grid(first, numel)](*arguments, **self._options)

    def write(
        self,
        target: torch.Tensor,
        weights: torch.Tensor,
        scale: torch.Tensor,
        first: int,
        width: int,
        *,
        scales_blocks: bool,
        rounds: bool,
    ) -> None:
        """As ``float8.write_block_bytes`` or ``write_bytes``, after rounding to bf16 if ``rounds``."""
        numel = weights.numel()
        tensors = (target, weights, scale)
        numbers = (first, numel, width, scale.shape[-1], float8.E4M3_MAX, scales_blocks, rounds)
        self._kernels.write_kernel[self._grid(first, numel)](*tensors, *numbers, **self._options)

    def _grid(self, first: int, numel: int) -> tuple[int]:
        block = self._kernels.NUMEL
        return (-(-(first + numel) // block) - first // block,)


def kernels_for(weights: torch.Tensor, width: int) -> Kernels | None:
    """Return the kernels, if they can serve weights of this width; it matters only where blocks are scaled."""
    return _kernels() if weights.is_cuda and width % float8.BLOCK == 0 else None


@functools.cache
def _kernels() -> Kernels | None:
    return Kernels() if importlib.util.find_spec("triton") is not None else None
