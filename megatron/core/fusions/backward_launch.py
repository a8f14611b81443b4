"""Launches the kernels of ``backward_kernels``; their results are those of the functions that they stand in for."""

from __future__ import annotations

import torch


def gated_backward(grad: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, *, activation: str) -> torch.Tensor:
    """Return the gradient [..., 2f] of x from that of ``activation``(gate) * up [..., f]; see ``bias_activation``.

    Args:
        activation: "silu" or "gelu" (its tanh form).
    """
    from megatron.core.fusions import backward_kernels as kernels

    grad, x = grad.contiguous(), x.contiguous()
    out, width = torch.empty_like(x), grad.shape[-1]
    grid = (grad.numel() // width, -(-width // kernels.BLOCK_NUMEL))
    if out.numel():
        kernels.gated_kernel[grid](
            grad,
            x,
            x if bias is None else bias.contiguous(),
            out,
            width,
            IS_SILU=activation == "silu",
            HAS_BIAS=bias is not None,
            BLOCK=kernels.BLOCK_NUMEL,
            num_warps=kernels.NUM_WARPS,
        )
    return out


def join_and_rotate_back(
    grad_query: torch.Tensor,
    grad_key: torch.Tensor,
    grad_value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
) -> torch.Tensor:
    """Return the gradient [s, b, (n + 2g) * d] of the query-key-value projection; see ``fused_rope``."""
    from megatron.core.fusions import backward_kernels as kernels

    sequence, batch, num_groups, width = grad_key.shape
    num_slots = grad_query.shape[2] // num_groups + 2
    out = grad_query.new_empty(sequence, batch, num_groups * num_slots * width)
    if out.numel():
        kernels.join_heads_kernel[(sequence * batch, num_groups)](
            grad_query.contiguous(),
            grad_key.contiguous(),
            grad_value.contiguous(),
            cos.contiguous(),
            sin.contiguous(),
            out,
            batch,
            num_groups,
            width,
            cos.shape[-1],
            NUM_SLOTS=num_slots,
            IS_INTERLEAVED=interleaved,
            ROWS=1 << (num_slots - 1).bit_length(),
            COLUMNS=1 << (width - 1).bit_length(),
            num_warps=kernels.NUM_WARPS,
        )
    return out
