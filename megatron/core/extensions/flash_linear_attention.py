"""Kernels of the package flash-linear-attention. Importing this file without it raises ImportError."""

import torch
from fla.ops.gated_delta_rule import chunk_gated_delta_rule

__all__ = ["fused_gated_delta_rule"]


def fused_gated_delta_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """Compute what ``megatron.core.ssm.delta_rule.gated_delta_rule`` does, on CUDA; same arguments."""
    repeats = value.shape[2] // key.shape[2]
    if repeats > 1:
        query, key = (x.repeat_interleave(repeats, dim=2) for x in (query, key))
    # The kernels take [b, s, ...], and read addresses, not strides.
    query, key, value, log_decay, beta = (x.transpose(0, 1).contiguous() for x in (query, key, value, log_decay, beta))
    context: torch.Tensor
    context, _ = chunk_gated_delta_rule(query, key, value, g=log_decay, beta=beta, use_qk_l2norm_in_kernel=True)
    return context.transpose(0, 1)
