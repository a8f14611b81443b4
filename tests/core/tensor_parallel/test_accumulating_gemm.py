"""Products are added to fp32 main gradients inside a GEMM: by apex's where it is there, by torch's otherwise."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch

from megatron.core.extensions import why_missing
from megatron.core.tensor_parallel import accumulating_gemm as gemms
from megatron.core.tensor_parallel.accumulating_gemm import accumulating_gemm, write_product

EXTENSION, OURS = "fused_weight_gradient_mlp_cuda", "megatron.core.extensions.apex"


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[ModuleType | None], None]]:
    """Let the process choose again, with this module (None: without one) in place of apex's extension."""

    def forget() -> None:
        sys.modules.pop(OURS, None)
        why_missing.cache_clear()
        accumulating_gemm.cache_clear()

    def choose_with(extension: ModuleType | None) -> None:
        monkeypatch.setitem(sys.modules, EXTENSION, extension)
        forget()

    yield choose_with
    monkeypatch.undo()
    forget()


def _extension() -> ModuleType:
    """A module with apex's function, which reads memory without looking at strides."""

    def wgrad_gemm_accum_fp32(inputs: torch.Tensor, grads: torch.Tensor, total: torch.Tensor) -> None:
        x, grad = (
            matrix.as_strided(matrix.shape, (matrix.shape[1], 1), matrix.storage_offset()) for matrix in (inputs, grads)
        )
        total.as_strided(total.shape, (total.shape[1], 1)).add_(grad.float().t() @ x.float())

    module = ModuleType(EXTENSION)
    module.wgrad_gemm_accum_fp32 = wgrad_gemm_accum_fp32  # type: ignore[attr-defined]
    return module


def _operands(num_tokens: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    total, a, b = (torch.randn(shape, generator=generator) for shape in [(3, 4), (num_tokens, 3), (num_tokens, 4)])
    return total, a.bfloat16(), b.bfloat16()


def test_the_choice_is_made_once(anew: Callable[[ModuleType | None], None]) -> None:
    anew(_extension())
    first = accumulating_gemm()
    sys.modules.pop(EXTENSION)
    assert accumulating_gemm() is first
    anew(None)
    assert accumulating_gemm() is gemms._add_by_torch


def test_apex_gets_what_it_can_read(anew: Callable[[ModuleType | None], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows no strides: operands are made contiguous, and another total, or an empty product, is torch's."""
    left_to_torch: list[torch.Tensor] = []
    monkeypatch.setattr(gemms, "_add_by_torch", lambda total, a, b: left_to_torch.append(total))
    anew(_extension())
    total, a, b = _operands()
    expected = total + a.float().t() @ b.float()
    wide = torch.stack((b, b), dim=2)[..., 0]
    accumulating_gemm()(total, a.t().contiguous().t(), wide)
    torch.testing.assert_close(total, expected)
    assert not left_to_torch
    turned, (_, none, no_rows) = torch.zeros(4, 3).t(), _operands(0)
    accumulating_gemm()(turned, a, b)
    accumulating_gemm()(total, none, no_rows)
    assert [each is other for each, other in zip(left_to_torch, (turned, total), strict=True)] == [True, True]


def test_an_extension_that_cannot_be_imported_is_told(
    anew: Callable[[ModuleType | None], None], caplog: pytest.LogCaptureFixture
) -> None:
    """One that is not there is no news."""
    anew(None)
    accumulating_gemm()
    assert not caplog.records
    anew(ModuleType(EXTENSION))  # built for another apex: without the function
    with caplog.at_level(logging.WARNING):
        assert accumulating_gemm() is gemms._add_by_torch
    assert "cannot be used, torch adds weight gradients: ImportError: cannot import name" in caplog.text


@pytest.mark.parametrize("num_tokens", [6, 0])
@pytest.mark.parametrize("overwrites", [True, False])
def test_without_such_a_gemm_it_is_product_and_addition(overwrites: bool, num_tokens: int) -> None:
    total, a, b = _operands(num_tokens)
    expected = a.t().mm(b) + (0.0 if overwrites else total)
    write_product(total, a, b, overwrites=overwrites)
    assert torch.equal(total, expected.float())


# ---- on devices -----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["torch", "apex"])
def _chosen(request: pytest.FixtureRequest, anew: Callable[[ModuleType | None], None]) -> str:
    """Choose each GEMM that is there."""
    if request.param == "torch":
        anew(None)
    elif (reason := why_missing("apex")) is not None:
        pytest.skip(f"apex's extension: {reason}")
    return str(request.param)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [2048, 0])
def test_cuda_adds_products_in_fp32_and_twice_the_same(_chosen: str, num_tokens: int, dtype: torch.dtype) -> None:
    """Llama-3-8B's widths; sums of 2,048 exact products differ by roundings of 2^-24 of what was added, not of 2^-8."""
    assert (accumulating_gemm() is gemms._add_by_torch) == (_chosen == "torch")
    generator = torch.Generator("cuda").manual_seed(1)
    o, i = 4096, 14336
    a, b = (torch.randn(num_tokens, n, device="cuda", generator=generator).to(dtype) for n in (o, i))
    start = torch.randn(o, i, device="cuda", generator=generator)
    runs = []
    for _ in range(2):
        # A view that begins in the middle of a buffer, as main gradients do.
        total = torch.full((o * i + 8,), float("nan"), device="cuda")[8:].view(o, i)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        write_product(total, a, b, overwrites=True)
        write_product(total, a, b, overwrites=False)
        # A product beside the total would be as large as it is; a GEMM's workspace is not.
        assert torch.cuda.max_memory_allocated() - before < 0.5 * total.nbytes
        runs.append([total.clone()])
        total.copy_(start)
        write_product(total, a, b, overwrites=False)
        runs[-1].append(total)
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))
    product = a[:, :256].double().t() @ b[:, :256].double()
    # Errors of a sum grow with the number of terms, at most; sizes are of the order of its root.
    expected = 2 * product, start[:256, :256].double() + product
    for total, right in zip(runs[0], expected, strict=True):
        torch.testing.assert_close(total[:256, :256].double(), right, rtol=1e-5, atol=1e-3)
