"""Newton-Schulz iterations bring singular values near 1, whatever else is in the batch."""

from __future__ import annotations

import pytest
import torch

from megatron.core.distributed.fsdp.matrices.newton_schulz import COEFFICIENTS, NewtonSchulz, newton_schulz_coefficients
from tests.support.plain_muon import QUINTIC, orthogonalized


def _matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", COEFFICIENTS)
def test_singular_values_come_near_1(kind: str) -> None:
    """In fp32, from a matrix whose values lie within a factor of 20."""
    u, _, v = torch.linalg.svd(_matrix(24, 40), full_matrices=False)
    matrix = u @ torch.diag(torch.linspace(0.05, 1.0, 24)) @ v
    iterate = NewtonSchulz(
        coefficients=newton_schulz_coefficients(kind, 10 if kind == "deepseekv4" else 5), eps=1e-15, dtype=torch.float32
    )
    values = torch.linalg.svdvals(iterate(matrix))
    assert values.min() > 0.5 and values.max() < 1.35, values


@pytest.mark.parametrize("shape", [(16, 40), (40, 16), (24, 24)])
def test_it_computes_what_the_plain_iteration_does(shape: tuple[int, int]) -> None:
    matrix = _matrix(*shape)
    iterate = NewtonSchulz(coefficients=newton_schulz_coefficients("quintic", 5), eps=1e-15)
    assert torch.equal(iterate(matrix).float(), orthogonalized(matrix, QUINTIC))
    batch = torch.stack([matrix, torch.zeros(shape), _matrix(*shape, seed=1)])
    together = iterate(batch)
    assert torch.equal(together[0], iterate(matrix)), "a matrix must not depend on the others of its batch"
    assert not together[1].any() and together.isfinite().all()


def test_steps_beyond_the_schedule_repeat_it_or_its_last() -> None:
    assert newton_schulz_coefficients("quintic", 7)[5:] == tuple(QUINTIC[:2])
    assert newton_schulz_coefficients("polar_express", 10)[7:] == ((1.875, -1.25, 0.375),) * 3
    for kind, steps, message in (
        ("nine", 5, "one of simple"),
        ("simple", 0, "1 step"),
        ("cubic5", 4, "5 steps, got 4"),
    ):
        with pytest.raises(ValueError, match=message):
            newton_schulz_coefficients(kind, steps)


def test_arithmetic_is_counted() -> None:
    """Two products with the long side and one without it, in each step; tall or wide is the same."""
    iterate = NewtonSchulz(coefficients=newton_schulz_coefficients("quintic", 5), eps=0.0)
    assert iterate.flops(4, 10) == iterate.flops(10, 4) == 5 * (2 * 2 * 16 * 10 + 2 * 64)
    assert NewtonSchulz(coefficients=newton_schulz_coefficients("cubic5", 5), eps=0.0).flops(4, 10) == 5 * 2 * 2 * 160
