"""Random numbers go on where they were."""

from __future__ import annotations

import random

import numpy as np
import torch

from megatron.training.dropout_seed import rng_state, seed_everything, seed_microbatch, set_rng_state


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


def test_a_microbatch_draws_the_same_whatever_was_drawn_before() -> None:
    seed_microbatch(5, 2, 3)
    first = torch.rand(4)
    torch.rand(9)
    seed_microbatch(5, 2, 3)
    assert torch.equal(torch.rand(4), first)
    seed_microbatch(5, 3, 2)
    assert not torch.equal(torch.rand(4), first)
