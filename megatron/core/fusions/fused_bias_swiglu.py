"""Megatron-Core's names of SwiGLU of a sum with a bias."""

from __future__ import annotations

import torch

from megatron.core.fusions import bias_activation


def swiglu(y: torch.Tensor) -> torch.Tensor:
    """Compute silu(a) * b for [..., 2h], whose halves are a and b."""
    return bias_activation.bias_swiglu(y)


def bias_swiglu(y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Compute ``swiglu(y + bias)``."""
    return bias_activation.bias_swiglu(y, bias)


def bias_swiglu_impl(
    input: torch.Tensor,
    bias: torch.Tensor | None,
    fp8_input_store: bool = False,
    cpu_offload_input: bool = False,
    clamp_value: float | None = None,
) -> torch.Tensor:
    """Compute ``swiglu(input + bias)``.

    Raises:
        NotImplementedError: another storage of the input, or clamping, is asked for.
    """
    asked = {"fp8_input_store": fp8_input_store, "cpu_offload_input": cpu_offload_input, "clamp_value": clamp_value}
    for name, value in asked.items():
        if value not in (False, None):
            raise NotImplementedError(f"bias_swiglu_impl({name}={value!r}) is not served")
    return bias_activation.bias_swiglu(input, bias)
