"""Whether a cell led to the numbers of one process."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tests.parity.cells import STEPS
from tests.parity.launches import Ran
from tests.parity.outcomes import Outcome

TOLERANCE = 1e-5
"""Relative. fp32 rounds at 6e-8; sums over ranks and chunks have other orders than in one process, which costs a few such
roundings per reduction, and three steps carry them on. What is measured is below 2e-6 everywhere. Adam would blow up
differences of gradients that are nearly zero, since it divides each by its own size: the command lines give it an epsilon of the
size of a typical gradient, which also makes weights feel the gradients' scale."""


def differences(ran: Ran, expected: Outcome) -> list[str]:
    """How a cell differs from its reference, a line for each quantity; [] where it agrees."""
    if isinstance(ran, str):
        return [ran]
    first = ran[0]
    found = [f"rank {rank} has other {what}" for rank, one in enumerate(ran) for what in _disagreements(one, first)]
    found += _off("loss", first.losses, expected.losses) + _off("gradient norm", first.norms, expected.norms)
    weights, unequal = _merged(ran)
    found += [f"ranks hold different values of {name}" for name in unequal]
    if lost := sorted(set(expected.weights) ^ set(weights)):
        found.append(f"weights of one side alone: {', '.join(lost)}")
    off = {name: _distance(weights[name], whole) for name, whole in expected.weights.items() if name in weights}
    found += [f"{name} is off by {by:.1e}" for name, by in off.items() if not by <= TOLERANCE]
    return found


def largest_difference(ran: list[Outcome], expected: Outcome) -> float:
    """The largest relative difference of any loss, norm or weight."""
    weights, _ = _merged(ran)
    pairs = [(ran[0].losses, expected.losses), (ran[0].norms, expected.norms)]
    scalars = [abs(a / b - 1) for got, true in pairs for a, b in zip(got, true, strict=True)]
    return max(*scalars, *(_distance(weights[name], whole) for name, whole in expected.weights.items()))


def _disagreements(one: Outcome, first: Outcome) -> list[str]:
    """All ranks must take the same decisions: what they see of losses and norms is equal to the bit."""
    return [name for name in ("losses", "norms") if getattr(one, name) != getattr(first, name)]


def _off(what: str, got: list[float], expected: list[float]) -> list[str]:
    if len(got) != STEPS or len(expected) != STEPS:
        return [f"{what}: {len(got)} and {len(expected)} steps instead of {STEPS}"]
    return [
        f"{what} of step {step + 1} is {a:.7g}, not {b:.7g} ({a / b - 1:+.1e})"
        for step, (a, b) in enumerate(zip(got, expected, strict=True))
        if not abs(a / b - 1) <= TOLERANCE
    ]


def _merged(ran: list[Outcome]) -> tuple[dict[str, npt.NDArray[np.float32]], list[str]]:
    """All weights of the model, and the names of those that ranks have different values of."""
    weights: dict[str, npt.NDArray[np.float32]] = {}
    unequal: dict[str, None] = {}
    for one in ran:
        for name, whole in one.weights.items():
            if not np.array_equal(weights.setdefault(name, whole), whole):
                unequal[name] = None
    return weights, list(unequal)


def _distance(got: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> float:
    if got.shape != expected.shape:
        return float("inf")
    size = float(np.linalg.norm(expected.astype(np.float64)))
    return float(np.linalg.norm(got.astype(np.float64) - expected.astype(np.float64))) / max(size, 1e-30)
