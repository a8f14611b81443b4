"""The state of random numbers is saved and restored."""

from __future__ import annotations

import random

import numpy as np
import torch

from megatron.training.loop.dropout_seed import microbatch_seed, rng_state, seed_everything, set_rng_state


def _draw() -> tuple[float, float, float, float]:
    return random.random(), random.gauss(0, 1), float(np.random.normal()), torch.rand(()).item()


def test_a_state_goes_on_where_it_was() -> None:
    seed_everything(2**40 + 7)
    _draw()
    state = rng_state(31)
    expected = [_draw() for _ in range(3)]
    seed_everything(1)
    assert set_rng_state(state) == 31
    assert [_draw() for _ in range(3)] == expected


def test_the_seed_of_a_microbatch_is_a_function_of_its_place_alone() -> None:
    """Neighbours in iterations and microbatches start unrelated streams; the values are those of earlier checkpoints."""
    seeds = {microbatch_seed(seed, iteration, piece) for seed in (5, 6) for iteration in range(3) for piece in range(4)}
    assert len(seeds) == 24 and all(0 <= seed < 2**63 for seed in seeds)
    assert microbatch_seed(5, 2, 3) == 1726756028563561329
