"""Kernels that write a gated activation and its gradient in FP8 agree with the same arithmetic in torch."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from megatron.core.fusions.float8_launch import gated_backward_in_fp8, gated_in_fp8

# The last tiles of rows and columns are not full; three dims, since transposed bytes are of the last one.
SHAPES = [(3, 30, 208), (1, 8, 32)]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def _exact(x: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


def _assert_close(byte: torch.Tensor | None, values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
    """The nearest number of the format, or, in the interpreter, which cuts off, the one before."""
    assert byte is not None
    largest, bits = torch.finfo(dtype).max, 3 if dtype is E4M3 else 2
    wanted = (values * scale).clamp(-largest, largest)
    error = (byte.view(dtype).float() - wanted).abs()
    ulp = 2.0**-bits if os.environ.get("TRITON_INTERPRET") == "1" else 0.51 * 2.0**-bits
    assert (error <= ulp * wanted.abs() + torch.finfo(dtype).smallest_normal * ulp * 2).all(), error.max()


def _compare(device: str = "cpu") -> None:
    torch.manual_seed(3)
    for shape in SHAPES:
        for activation in ("silu", "gelu"):
            x = torch.randn(*shape[:-1], 2 * shape[-1]).bfloat16().to(device)
            grad = torch.randn(shape).bfloat16().to(device)
            leaf = x.float().requires_grad_()
            exact = _exact(leaf, activation)
            exact.backward(grad.float())
            assert leaf.grad is not None
            for factor in (1.0, 64.0, 1e4 if device == "cuda" else 64.0):  # beyond the largest numbers
                scale = torch.tensor(factor, device=device)
                for rows, columns in ((True, True), (True, False), (False, True)):
                    amax = torch.zeros(1, device=device)
                    data, transposed = gated_in_fp8(
                        x, activation=activation, dtype=E4M3, scale=scale, amax=amax, rows=rows, columns=columns
                    )
                    torch.testing.assert_close(amax[0], exact.detach().abs().max(), rtol=1e-5, atol=0.0)
                    assert (data is not None, transposed is not None) == (rows, columns)
                    if data is not None:
                        _assert_close(data, exact.detach(), scale, E4M3)
                    if transposed is not None:
                        _assert_close(transposed, exact.detach().movedim(-1, 0), scale, E4M3)
                    if data is not None and transposed is not None:
                        assert torch.equal(data.movedim(-1, 0), transposed)
                for columns in (True, False):
                    amax = torch.full((1,), 1e-3, device=device)
                    data, transposed = gated_backward_in_fp8(
                        grad, x, activation=activation, dtype=E5M2, scale=scale, amax=amax, columns=columns
                    )
                    torch.testing.assert_close(amax[0], leaf.grad.abs().max(), rtol=1e-5, atol=0.0)
                    _assert_close(data, leaf.grad, scale, E5M2)
                    assert (transposed is not None) == columns
                    if transposed is not None:
                        assert torch.equal(data.movedim(-1, 0), transposed)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_interpreted_kernels_agree_with_torch() -> None:
    command = [sys.executable, "-c", f"from {__name__} import _compare; _compare()"]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu(1)
def test_kernels_on_a_device_agree_with_torch() -> None:
    _compare("cuda")
