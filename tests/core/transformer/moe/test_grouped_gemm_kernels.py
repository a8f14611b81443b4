"""Weight gradients of experts where their owner wants them: a Triton kernel, interpreted and on a device, and torch's fallback."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron.core.transformer.moe.grouped_gemm import grouped_linear
from tests.core.transformer.moe.test_experts import on_cpu

# Idle experts at the ends and in the middle, and numbers of rows that are no multiples of a tile.
COUNTS = [(0, 70, 0, 1, 200, 0), (64, 128), (0, 0)]
PADDING = 5  # rows behind the last expert's, which are NaN


def _products(
    device: str, total: torch.dtype, counts: tuple[int, ...], *, overwrites: bool, width_o: int, width_i: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the kernel wrote to matrices that lie apart, and what it should be, both [l, o, i] in fp32."""
    from megatron.core.transformer.moe.grouped_gemm_kernels import write_weight_gradients

    generator = torch.Generator().manual_seed(sum(counts))
    # The interpreter multiplies the bits of bf16 as if they were integers.
    half = torch.float32 if device == "cpu" else torch.bfloat16
    rows = [torch.randn(sum(counts) + PADDING, width, generator=generator).to(half) for width in (width_o, width_i)]
    for matrix in rows:
        matrix[sum(counts) :] = float("nan")
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32).to(device)
    former = torch.randn(len(counts), width_o * width_i + 24, generator=generator)
    memory = (torch.full_like(former, float("nan")) if overwrites else former).to(device, total, copy=True)
    totals = memory[:, : width_o * width_i].unflatten(1, (width_o, width_i))
    before = memory[:, width_o * width_i :].clone()
    write_weight_gradients(totals, rows[0].to(device), rows[1].to(device), ends, overwrites=overwrites)
    torch.testing.assert_close(memory[:, width_o * width_i :], before, equal_nan=True, msg="it wrote between matrices")
    pairs = zip(*(matrix.float().split([*counts, PADDING])[:-1] for matrix in rows), strict=True)
    expected = torch.stack([a.t() @ b for a, b in pairs])
    if not overwrites:
        expected += former[:, : width_o * width_i].to(total).float().unflatten(1, (width_o, width_i))
    return totals.float().cpu(), expected


def _compare(device: str) -> None:
    for counts, dtype, overwrites in itertools.product(COUNTS, (torch.float32, torch.bfloat16), (True, False)):
        for width_o, width_i in ((136, 72), (16, 264)):
            ours, expected = _products(device, dtype, counts, overwrites=overwrites, width_o=width_o, width_i=width_i)
            tolerance = 1e-4 if dtype is torch.float32 else 1e-2
            torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance * 8)


def check_interpreted() -> None:
    _compare("cpu")


@pytest.mark.gpu(1)
def test_the_kernel_on_a_device_writes_and_adds() -> None:
    _compare("cuda")


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=on_cpu), pytest.param("cuda", marks=pytest.mark.gpu(1))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_written_then_added_where_the_owner_wants_them(device: str, dtype: torch.dtype) -> None:
    """Autograd gets none. An expert without rows counts as zeros, also in memory that held something else."""
    counts, generator = (3, 0, 21), torch.Generator().manual_seed(0)
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32).to(device)
    x = torch.randn(24, 16, generator=generator).to(device, torch.bfloat16)
    weights = [torch.randn(32, 16, generator=generator).to(device, torch.bfloat16).requires_grad_() for _ in counts]
    (whole,) = torch.autograd.grad(grouped_linear(x, weights, ends).float().sin().sum(), [weights[2]])
    memory = torch.full((3, 32, 16), float("nan"), dtype=dtype, device=device)
    for index, weight in enumerate(weights):
        weight.get_main_grad = lambda index=index: memory[index]  # type: ignore[attr-defined]
    for use in range(2):
        for weight in weights:
            weight.overwrite_main_grad = use == 0  # type: ignore[attr-defined]
        grouped_linear(x, weights, ends).float().sin().sum().backward()
    assert all(weight.grad is None and weight.grad_added_to_main_grad for weight in weights)  # type: ignore[attr-defined]
    assert not memory[1].any()
    torch.testing.assert_close(memory[2].float(), 2 * whole.float(), rtol=2e-2, atol=2e-2)
