"""Launches the kernels of ``float8_kernels``."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Written(NamedTuple):
    """What a kernel has written."""

    data: torch.Tensor | None
    """Bytes [..., columns]."""
    transposed: torch.Tensor | None
    """Transposed bytes [columns, ...]."""
    kept: tuple[torch.Tensor, torch.Tensor] | None = None
    """The input [..., 2f] in E4M3 and its inverse scales [rows, tiles], fp32; [Note: kept input] in ``float8_kernels``."""


def gated_in_fp8(
    x: torch.Tensor,
    *,
    activation: str,
    dtype: torch.dtype,
    scale: torch.Tensor,
    amax: torch.Tensor,
    rows: bool,
    columns: bool,
    keeps_input: bool = False,
) -> Written:
    """Compute ``activation``(gate) * up of x [..., 2f] in FP8: [..., f].

    Args:
        activation: "silu" or "gelu" (its tanh form).
        dtype: torch's float8 dtype of the result.
        scale: [1] factor, fp32.
        amax: [1] raised to the largest absolute value before scaling, fp32.
        rows, columns: what is to be written: the bytes, the transposed bytes.
    """
    from megatron.core.fusions import float8_kernels as kernels

    x = x.contiguous()
    lead, width = x.shape[:-1], x.shape[-1] // 2
    num_rows, num_tiles = lead.numel(), -(-width // kernels.COLUMNS)
    out = x.new_empty((*lead, width), dtype=dtype) if rows else None
    transposed = x.new_empty((width, *lead), dtype=dtype) if columns else None
    kept = None
    if keeps_input:
        kept = torch.empty_like(x, dtype=torch.float8_e4m3fn), scale.new_empty(num_rows, 2 * num_tiles)
    written = out if out is not None else transposed
    if written is not None and written.numel():
        kernels.gated_kernel[num_tiles, -(-num_rows // kernels.ROWS)](
            x,
            scale,
            amax,
            written if out is None else out,
            written if transposed is None else transposed,
            *((written, amax) if kept is None else kept),
            num_rows,
            width,
            IS_SILU=activation == "silu",
            LARGEST=torch.finfo(dtype).max,
            WRITES_ROWS=rows,
            WRITES_COLUMNS=columns,
            KEEPS=keeps_input,
            ROWS=kernels.ROWS,
            COLUMNS=kernels.COLUMNS,
            num_warps=kernels.NUM_WARPS,
        )
    return Written(_bytes(out), _bytes(transposed), kept)


def gated_backward_in_fp8(
    grad: torch.Tensor,
    x: torch.Tensor,
    inverse: torch.Tensor | None = None,
    *,
    activation: str,
    dtype: torch.dtype,
    scale: torch.Tensor,
    amax: torch.Tensor,
    columns: bool,
) -> Written:
    """Compute the gradient [..., 2f] of x from that of ``activation``(gate) * up [..., f], in FP8.

    Args:
        inverse: x and it are what ``gated_in_fp8`` kept; None: x is what it was given.
        activation, dtype, scale, amax, columns: as for ``gated_in_fp8``, of the gradient.
    """
    from megatron.core.fusions import float8_kernels as kernels

    grad, x = grad.contiguous(), x.contiguous()
    lead, width = x.shape[:-1], x.shape[-1] // 2
    num_rows = lead.numel()
    out = torch.empty_like(x, dtype=dtype)
    transposed = x.new_empty((2 * width, *lead), dtype=dtype) if columns else None
    if out.numel():
        kernels.gated_backward_kernel[-(-width // kernels.COLUMNS), -(-num_rows // kernels.ROWS)](
            grad,
            x,
            scale if inverse is None else inverse,
            scale,
            amax,
            out,
            out if transposed is None else transposed,
            num_rows,
            width,
            IS_SILU=activation == "silu",
            LARGEST=torch.finfo(dtype).max,
            WRITES_COLUMNS=columns,
            IS_KEPT=inverse is not None,
            ROWS=kernels.ROWS,
            COLUMNS=kernels.COLUMNS,
            num_warps=kernels.NUM_WARPS,
        )
    return Written(out.view(torch.uint8), _bytes(transposed))


def kept_values(kept: torch.Tensor, inverse: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the input [..., 2f] that ``gated_in_fp8`` kept."""
    from megatron.core.fusions import float8_kernels as kernels

    halves = kept.float().view(len(inverse), 2, -1)
    scales = inverse.view(len(inverse), 2, -1).repeat_interleave(kernels.COLUMNS, dim=-1)
    return (halves * scales[..., : halves.shape[-1]]).view(kept.shape).to(dtype)


def _bytes(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.view(torch.uint8)
