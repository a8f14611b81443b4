"""Activations of the MLP, fused with their bias; they keep only their input for backward.

Shapes: s sequence, b batch, f MLP width; a gated input holds [gate; up] in its last dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from megatron.core.fusions.backward_launch import gated_backward
from megatron.core.jit import Fusible


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) * up, [..., 2f] -> [..., f], by PyTorch's own kernels. Source: arXiv:2002.05202."""
    activated: torch.Tensor = _SwiGLU.apply(x)  # type: ignore[no-untyped-call, unused-ignore]
    return activated


def bias_swiglu(x: torch.Tensor, bias: torch.Tensor | None = None, *, compiled: bool = True) -> torch.Tensor:
    """Compute silu(gate) * up of x [..., 2f] + bias [2f] in fp32; return [..., f] in the dtype of x."""
    return _apply(_SWIGLU, x, bias, compiled)


def bias_geglu(x: torch.Tensor, bias: torch.Tensor | None = None, *, compiled: bool = True) -> torch.Tensor:
    """Compute gelu(gate) * up of x [..., 2f] + bias [2f], with Megatron-Core's tanh form of GELU; return [..., f]."""
    return _apply(_GEGLU, x, bias, compiled)


def bias_gelu(x: torch.Tensor, bias: torch.Tensor | None = None, *, compiled: bool = True) -> torch.Tensor:
    """Compute gelu(x + bias) of [..., f] and [f], with Megatron-Core's tanh form of GELU; return [..., f]."""
    return _apply(_GELU, x, bias, compiled)


@Fusible
def _swiglu(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    gate, up = _biased(x, bias).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


@Fusible
def _swiglu_backward(grad: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    gate, up = _biased(x, bias).chunk(2, dim=-1)
    wide, sigmoid = grad.float(), torch.sigmoid(gate)
    grad_gate = wide * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat((grad_gate, wide * gate * sigmoid), dim=-1).to(x.dtype)


@Fusible
def _geglu(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    gate, up = _biased(x, bias).chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh") * up).to(x.dtype)


@Fusible
def _geglu_backward(grad: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    gate, up = _biased(x, bias).chunk(2, dim=-1)
    wide = grad.float()
    grad_gate = torch.ops.aten.gelu_backward(wide * up, gate, approximate="tanh")
    return torch.cat((grad_gate, wide * F.gelu(gate, approximate="tanh")), dim=-1).to(x.dtype)


@Fusible
def _gelu(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.gelu(_biased(x, bias), approximate="tanh").to(x.dtype)


@Fusible
def _gelu_backward(grad: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    grad_x: torch.Tensor = torch.ops.aten.gelu_backward(grad.float(), _biased(x, bias), approximate="tanh")
    return grad_x.to(x.dtype)


def _biased(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.float() if bias is None else x.float() + bias.float()


@dataclass(frozen=True, kw_only=True)
class _Activation:
    forward: Fusible
    """(x, bias) -> activated."""
    backward: Fusible
    """(grad of activated, x, bias) -> grad of x."""


_swiglu_backward.kernel = partial(gated_backward, activation="silu")
_geglu_backward.kernel = partial(gated_backward, activation="gelu")

_SWIGLU = _Activation(forward=_swiglu, backward=_swiglu_backward)
_GEGLU = _Activation(forward=_geglu, backward=_geglu_backward)
_GELU = _Activation(forward=_gelu, backward=_gelu_backward)


def _apply(activation: _Activation, x: torch.Tensor, bias: torch.Tensor | None, compiled: bool) -> torch.Tensor:
    activated: torch.Tensor = _KeepInput.apply(activation, x, bias, compiled)  # type: ignore[no-untyped-call, unused-ignore]
    return activated


class _KeepInput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, activation: _Activation, x: torch.Tensor, bias: torch.Tensor | None, compiled: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(x, bias)
        ctx.activation, ctx.compiled = activation, compiled
        activated: torch.Tensor = activation.forward(compiled, x, bias)
        return activated

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        grad_x = ctx.activation.backward(ctx.compiled, grad_outputs[0], x, bias)
        grad_bias = grad_x.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return None, grad_x, grad_bias, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> torch.Tensor:
        (grad,), (x,) = grad_outputs, ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        grad_x = torch.empty_like(x)
        grad_gate, grad_up = grad_x.chunk(2, dim=-1)
        torch.mul(grad, F.silu(gate), out=grad_up)
        grad_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
        return grad_x
