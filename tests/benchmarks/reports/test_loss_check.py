"""What the loss check calls a fault."""

from __future__ import annotations

import math

import pytest

from benchmarks.measure.steps import Measurement
from benchmarks.reports.loss_check import LOSS_TOLERANCE, NORM_TOLERANCE, differences


def _measurement(name: str, losses: list[float], norms: list[float]) -> Measurement:
    return Measurement(name=name, num_warmup=0, losses=losses, grad_norms=norms)


REFERENCE = _measurement("fsdp2", [10.0, 9.0, 8.0], [2.0, 1.5, 1.0])


def test_rounding_noise_passes() -> None:
    ours = _measurement("ours", [10.0, 9.001, 8.01], [2.001, 1.501, 1.005])
    assert differences(ours, REFERENCE) == []


@pytest.mark.parametrize(
    ("losses", "norms", "words"),
    [
        ([10.002, 9.0, 8.0], [2.0, 1.5, 1.0], "step 1: loss"),  # equal weights must give equal losses
        ([10.0, 9.0, 8.0 * (1 + 1.1 * LOSS_TOLERANCE)], [2.0, 1.5, 1.0], "step 3: loss"),
        ([10.0, 9.0, 8.0], [2.0, 1.5 * (1 - 1.1 * NORM_TOLERANCE), 1.0], "step 2: gradient norm"),
        ([10.0, math.nan, 8.0], [2.0, 1.5, 1.0], "step 2: loss nan"),
    ],
)
def test_a_departure_is_named_by_step_and_kind(losses: list[float], norms: list[float], words: str) -> None:
    (fault,) = differences(_measurement("ours", losses, norms), REFERENCE)
    assert words in fault


def test_runs_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="same steps, got 2 of ours and 3 of fsdp2"):
        differences(_measurement("ours", [10.0, 9.0], [2.0, 1.5]), REFERENCE)
