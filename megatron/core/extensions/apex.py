"""apex's matrix product that is added to an fp32 matrix. Importing this file without its extension raises ImportError."""

import torch
from fused_weight_gradient_mlp_cuda import wgrad_gemm_accum_fp32

__all__ = ["add_product"]


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add a [t, o] transposed times b [t, i] to total [o, i]: fp32 and contiguous; the others bf16 or fp16 of one dtype."""
    # The extension reads addresses, not strides.
    wgrad_gemm_accum_fp32(b.contiguous(), a.contiguous(), total)
