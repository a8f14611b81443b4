"""Launches the kernels of ``float8_kernels``."""

from __future__ import annotations

import torch


def gated_in_fp8(
    x: torch.Tensor,
    *,
    activation: str,
    dtype: torch.dtype,
    scale: torch.Tensor,
    amax: torch.Tensor,
    rows: bool,
    columns: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Compute ``activation``(gate) * up of x [..., 2f] in FP8.

    Args:
        activation: "silu" or "gelu" (its tanh form).
        dtype: torch's float8 dtype of the result.
        scale: [1] factor, fp32.
        amax: [1] raised to the largest absolute value before scaling, fp32.

    Returns:
        The bytes [..., f] if ``rows``, and the transposed bytes [f, ...] if ``columns``; each else None.
    """
    from megatron.core.fusions import float8_kernels as kernels

    x = x.contiguous()
    lead, width = x.shape[:-1], x.shape[-1] // 2
    out = x.new_empty((*lead, width), dtype=dtype) if rows else None
    transposed = x.new_empty((width, *lead), dtype=dtype) if columns else None
    written = out if out is not None else transposed
    num_rows = lead.numel()
    if written is not None and written.numel():
        kernels.gated_kernel[_grid(num_rows, width)](
            x,
            scale,
            amax,
            written if out is None else out,
            written if transposed is None else transposed,
            num_rows,
            width,
            IS_SILU=activation == "silu",
            LARGEST=torch.finfo(dtype).max,
            WRITES_ROWS=rows,
            WRITES_COLUMNS=columns,
            ROWS=kernels.ROWS,
            COLUMNS=kernels.COLUMNS,
            num_warps=kernels.NUM_WARPS,
        )
    return _bytes(out), _bytes(transposed)


def gated_backward_in_fp8(
    grad: torch.Tensor,
    x: torch.Tensor,
    *,
    activation: str,
    dtype: torch.dtype,
    scale: torch.Tensor,
    amax: torch.Tensor,
    columns: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the gradient of x [..., 2f] from that of ``activation``(gate) * up [..., f], in FP8.

    Arguments and results are as those of ``gated_in_fp8``, for x.
    """
    from megatron.core.fusions import float8_kernels as kernels

    grad, x = grad.contiguous(), x.contiguous()
    lead, width = x.shape[:-1], x.shape[-1] // 2
    out = torch.empty_like(x, dtype=dtype)
    transposed = x.new_empty((2 * width, *lead), dtype=dtype) if columns else None
    num_rows = lead.numel()
    if out.numel():
        kernels.gated_backward_kernel[_grid(num_rows, width)](
            grad,
            x,
            scale,
            amax,
            out,
            out if transposed is None else transposed,
            num_rows,
            width,
            IS_SILU=activation == "silu",
            LARGEST=torch.finfo(dtype).max,
            WRITES_COLUMNS=columns,
            ROWS=kernels.ROWS,
            COLUMNS=kernels.COLUMNS,
            num_warps=kernels.NUM_WARPS,
        )
    return out.view(torch.uint8), _bytes(transposed)


def _grid(num_rows: int, width: int) -> tuple[int, int]:
    from megatron.core.fusions import float8_kernels as kernels

    return -(-width // kernels.COLUMNS), -(-num_rows // kernels.ROWS)


def _bytes(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.view(torch.uint8)
