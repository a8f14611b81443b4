"""The local part of a reduction: the scaled sum of the pieces of several ranks, in one pass over memory."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron.core.distributed.fsdp.comm.transport import scale_and_accumulate

# The Triton kernel's number of arguments, and the dtypes that it adds in fp32.
MAX_KERNEL_PIECES = 8
_KERNEL_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))


def sum_pieces(
    out: torch.Tensor,
    pieces: Sequence[torch.Tensor],
    *,
    scale: float = 1.0,
    accumulate: bool = False,
) -> None:
    """Write ``scale`` times the sum of ``pieces`` [N] of [S] to ``out`` [S], or add it to ``out`` (``accumulate``).

    Pieces are added in fp32 or wider, from the first to the last, so the result is bitwise the same every time. On CUDA
    it is one kernel.
    """
    if len(pieces) == 1 and out.dtype == pieces[0].dtype:
        scale_and_accumulate(out, pieces[0], scale=scale, accumulate=accumulate)
        return
    if (out.is_cuda or _is_interpreted()) and _for_kernel(out, pieces):
        kernel = _kernel()
        if kernel is not None:
            kernel(out, pieces, scale, accumulate)
            return
    total = pieces[0].to(torch.promote_types(pieces[0].dtype, torch.float32), copy=True)
    for piece in pieces[1:]:
        total += piece
    scale_and_accumulate(out, total, scale=scale, accumulate=accumulate)


def _for_kernel(out: torch.Tensor, pieces: Sequence[torch.Tensor]) -> bool:
    return len(pieces) <= MAX_KERNEL_PIECES and out.dtype in _KERNEL_DTYPES and pieces[0].dtype in _KERNEL_DTYPES


@functools.cache
def _is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _kernel() -> Callable[..., Any] | None:
    """Import the kernel at its first use; None where Triton is not installed."""
    try:
        from megatron.core.distributed.fsdp.comm.sum_pieces_triton import sum_with_triton
    except ImportError:
        return None
    return sum_with_triton
