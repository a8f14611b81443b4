"""Kernels that write a gated activation and its gradient in FP8 agree with the same arithmetic in torch."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from megatron.core.fusions import float8_launch
from megatron.core.fusions.float8_launch import gated_backward_in_fp8, gated_in_fp8, kept_values

# The last tiles of rows and columns are not full; three dims, since transposed bytes are of the last one.
SHAPES = [(3, 30, 208), (1, 8, 32)]
COLUMNS = 64
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
            for factor in (1.0, 64.0, 1e4) if device == "cuda" else (1.0, 64.0):  # beyond the largest numbers
                scale = torch.tensor(factor, device=device)
                for rows, columns in ((True, True), (True, False), (False, True)):
                    amax = torch.zeros(1, device=device)
                    settings: Any = {"activation": activation, "dtype": E4M3, "scale": scale, "amax": amax}
                    data, transposed, kept = gated_in_fp8(x, rows=rows, columns=columns, keeps_input=rows, **settings)
                    assert (kept is not None) == rows
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
                    settings = {"activation": activation, "dtype": E5M2, "scale": scale, "amax": amax}
                    data, transposed, _ = gated_backward_in_fp8(grad, x, columns=columns, **settings)
                    assert data is not None
                    torch.testing.assert_close(amax[0], leaf.grad.abs().max(), rtol=1e-5, atol=0.0)
                    _assert_close(data, leaf.grad, scale, E5M2)
                    assert (transposed is not None) == columns
                    if transposed is not None:
                        assert torch.equal(data.movedim(-1, 0), transposed)


def _compare_kept(device: str = "cpu") -> None:
    """The input is kept to three bits wherever it is beside the largest of its tile, and the gradient is that of what is kept."""
    torch.manual_seed(4)
    for shape in SHAPES:
        x = (torch.randn(*shape[:-1], 2 * shape[-1]) * torch.logspace(-3, 3, 2 * shape[-1])).bfloat16().to(device)
        x[0, :2] = 0.0
        grad = torch.randn(shape).bfloat16().to(device)
        settings: Any = {"activation": "silu", "scale": torch.ones((), device=device)}
        forward: Any = {"dtype": E4M3, "amax": torch.zeros(1, device=device), "rows": True, "columns": False}
        written, plain = (gated_in_fp8(x, **settings, **forward, keeps_input=keeps) for keeps in (True, False))
        assert written.data is not None and plain.data is not None and torch.equal(written.data, plain.data)
        assert written.kept is not None
        values = kept_values(*written.kept, torch.float32)
        tiles = F.pad(x.float().unflatten(-1, (2, -1)), (0, -shape[-1] % COLUMNS)).unflatten(-1, (-1, COLUMNS))
        largest = tiles.abs().amax(-1).repeat_interleave(COLUMNS, -1)[..., : shape[-1]].flatten(-2)
        ulp = 2.0**-3 if os.environ.get("TRITON_INTERPRET") == "1" else 2.0**-4
        error = (values - x.float()).abs()
        assert (error <= x.float().abs() * ulp * 1.01 + largest * 2.0**-17).all(), (error - x.float().abs() * ulp).max()
        results = []
        for values_of_x, inverse in ((x, None), (values.bfloat16(), None), written.kept):
            backward: Any = {"dtype": E5M2, "amax": torch.zeros(1, device=device), "columns": True}
            data, transposed, _ = gated_backward_in_fp8(grad, values_of_x, inverse, **settings, **backward)
            assert data is not None and transposed is not None and torch.equal(data.movedim(-1, 0), transposed)
            results.append(data.view(E5M2).float())
        noise = (results[2] - results[0]).norm() / results[0].norm()
        assert (results[2] - results[1]).norm() / results[1].norm() < 0.02
        assert 0.0 < noise < 0.1, noise


def _compare_as_a_process_does() -> None:
    """What a process finds before it relies on the kernels: that they work, and that transposed bytes are not written."""
    cpu = torch.device("cpu")
    for activation in ("silu", "gelu"):
        assert float8_launch.kernels_work(activation, cpu)
        for name in ("gated_in_fp8", "gated_backward_in_fp8"):
            function = getattr(float8_launch, name)

            def without_transposed(*args: Any, made_by: Any = function, **settings: Any) -> float8_launch.Written:
                written: float8_launch.Written = made_by(*args, **settings)
                if written.transposed is not None:
                    written.transposed.copy_(torch.randint_like(written.transposed, 120))
                return written

            with patch.object(float8_launch, name, without_transposed):
                assert not float8_launch.kernels_work.__wrapped__(activation, cpu)


def check_interpreted() -> None:
    _compare()
    _compare_kept()
    _compare_as_a_process_does()


@pytest.mark.gpu(1)
def test_kernels_on_a_device_agree_with_torch() -> None:
    _compare("cuda")
    _compare_kept("cuda")
    assert all(float8_launch.kernels_work(name, torch.device("cuda", 0)) for name in ("silu", "gelu"))
