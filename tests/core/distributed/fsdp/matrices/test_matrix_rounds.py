"""Matrices are divided over ranks so that none works much longer than the others, and rounds are not too large."""

from __future__ import annotations

from collections import Counter

import pytest

from megatron.core.distributed.fsdp.matrices.newton_schulz import NewtonSchulz, batch_size, newton_schulz_coefficients
from megatron.core.distributed.fsdp.matrices.orthogonalizer import owners_of, rounds_of

ITERATE = NewtonSchulz(coefficients=newton_schulz_coefficients("quintic", 5), eps=1e-15)
# Rows and columns of a layer's matrices: queries, keys and values together as they are, output, gated fc1, fc2.
LLAMA_1B = [(3072, 2048), (2048, 2048), (11264, 2048), (2048, 5632)]
LLAMA_70B = [(10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)]
EXPERTS = [(9216, 7168), (7168, 16384), *[(4096, 7168), (7168, 2048)] * 32]


@pytest.mark.parametrize(
    ("shapes", "num_layers", "num_ranks", "most"),
    [(LLAMA_1B, 22, 2, 1.01), (LLAMA_1B, 22, 8, 1.05), (LLAMA_70B, 80, 32, 1.1), (EXPERTS, 16, 64, 1.1)],
)
def test_work_is_balanced_by_its_arithmetic(
    shapes: list[tuple[int, int]], num_layers: int, num_ranks: int, most: float
) -> None:
    """The busiest rank has little more than the mean."""
    costs = [ITERATE.flops(*shape) for _ in range(num_layers) for shape in shapes]
    owners = owners_of(costs, num_ranks)
    loads = Counter[int]()
    for owner, cost in zip(owners, costs, strict=True):
        loads[owner] += int(cost)
    assert len(loads) == num_ranks and max(loads.values()) <= most * sum(costs) / num_ranks


def test_more_ranks_than_matrices_leave_some_idle() -> None:
    assert owners_of([3.0, 1.0, 2.0], 8) == [0, 2, 1]


def test_a_round_holds_what_fits_of_each_owner_in_order() -> None:
    owners, numels = [0, 0, 1, 0, 1, 0], [6, 6, 20, 4, 1, 5]
    assert rounds_of(owners, numels, round_numel=10) == [0, 1, 0, 1, 1, 2]
    assert rounds_of(owners, numels, round_numel=10**6) == [0] * 6


def test_batches_depend_on_the_shape_alone_and_large_matrices_are_multiplied_alone() -> None:
    assert batch_size(2048, 2048, "cuda") == batch_size(5632, 2048, "cuda") == 1
    assert batch_size(256, 2048, "cuda") == batch_size(2048, 256, "cuda") == 16
    assert batch_size(1, 1, "cuda") == batch_size(16, 16, "cpu") == 32
    assert batch_size(512, 512, "cpu") == 1
