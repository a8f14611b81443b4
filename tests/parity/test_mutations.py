"""Faults on purpose turn cells red: what the matrix cannot see it does not test."""

from __future__ import annotations

from functools import cache

import pytest

from tests.parity.mutations import MUTATIONS, PROBES, Mutation, reddened

_QUICK = {
    "no outer reduction": "hfsdp",
    "the norm counts every replica": "tp",
    "experts are balanced over a rank's own tokens": "moe cp",
    "expert biases follow a rank's own tokens": "moe bias",
    "a mean is over a context-parallel rank's own tokens": "cp",
}
"""Cells of one microbatch and four ranks, which share a launch."""


@cache
def _found() -> dict[tuple[str, str], list[str]]:
    return reddened(list(_QUICK.items()))


@pytest.mark.parametrize("mutation", _QUICK)
def test_a_fault_turns_its_cell_red(mutation: str) -> None:
    """``python -m tests.parity.mutations`` tries all faults on all probes."""
    assert _QUICK[mutation] in MUTATIONS[mutation].reddens.split(", ")
    lines = _found()[mutation, _QUICK[mutation]]
    assert any("instead of" not in line and ("is off by" in line or "of step" in line) for line in lines), lines


def test_an_error_of_the_patch_itself_is_not_seen() -> None:
    """A patch whose function has changed since ends a run as well, and shows nothing."""
    own, refused = "Traceback ...\nTypeError: <lambda>() missing 1 argument", "Traceback ...\nRuntimeError: needs sums"
    shown, ends = Mutation(lambda patch: None, "tp"), Mutation(lambda patch: None, "tp", refused=("needs sums",))
    assert [shown.is_seen(lines) for lines in ([], ["loss of step 3 is off"], [own], [refused])] == [
        False,
        True,
        False,
        False,
    ]
    assert [ends.is_seen(lines) for lines in ([], [own], [refused])] == [False, False, True]


def test_every_fault_is_seen_by_a_probe() -> None:
    for name, mutation in MUTATIONS.items():
        seen_by = mutation.reddens.split(", ")
        assert seen_by and set(seen_by) <= set(PROBES), name
