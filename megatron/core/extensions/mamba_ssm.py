"""Kernels of the package mamba-ssm. Importing this file without it raises ImportError."""

import torch
from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

__all__ = ["fused_state_space_scan"]

_CHUNK = 128


def fused_state_space_scan(
    x: torch.Tensor, step: torch.Tensor, rate: torch.Tensor, write: torch.Tensor, read: torch.Tensor
) -> torch.Tensor:
    """Compute what ``megatron.core.ssm.state_space_scan`` does, on CUDA; same arguments."""
    # The kernels take [b, s, ...].
    x, step, write, read = (part.transpose(0, 1).contiguous() for part in (x, step, write, read))
    outputs: torch.Tensor = mamba_chunk_scan_combined(x, step, -rate, write, read, _CHUNK)
    return outputs.transpose(0, 1)
