"""A small sample of each kind of damage; the scripts of this folder run the numbers."""

from __future__ import annotations

import pytest

from tests.damage import checkpoints, corpora, kills


@pytest.mark.filterwarnings("ignore")
def test_mutated_corpora_are_refused_or_give_the_same_samples() -> None:
    outcomes, faults = corpora.mutate_often(100, seed=1)
    assert faults == []
    assert outcomes["refused"] > 70 and outcomes["the same samples"] > 0


def test_mutated_checkpoints_are_refused_or_load_what_was_saved() -> None:
    outcomes, faults = checkpoints.mutate_often(60, seed=1)
    assert faults == []
    assert outcomes["refused"] > 15 and outcomes["refused, written by PyTorch"] > 15


@pytest.mark.parametrize("trials", [2, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.timeout(3600)
def test_killed_runs_go_on_to_the_last_bit(trials: int) -> None:
    outcomes = kills.kill_often(trials, seed=1)
    assert outcomes.faults == []
    assert outcomes.counts["checkpoints compared"] > 0
