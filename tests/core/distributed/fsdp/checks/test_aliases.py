"""What is remembered of the memory of parameters from before they were sharded. Refusals are in ``api/test_errors.py``."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

from megatron.core.distributed.fsdp.checks import aliases
from megatron.core.distributed.fsdp.checks.aliases import refuse_aliases, remember, stretches_of


class _Unit:
    """Stands in for a unit: it is hashed by identity."""


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many stretches of other units each call has compared with."""
    counts: list[int] = []
    original = aliases._neighbors

    def counting(inside: Any, outside: Any) -> Any:
        counts.append(len(outside))
        return original(inside, outside)

    monkeypatch.setattr(aliases, "_neighbors", counting)
    yield counts


def test_a_unit_is_compared_with_those_that_share_its_storages(compared: list[int]) -> None:
    """With all others, sharding a model would take a time that is quadratic in the number of its units."""
    units = []
    for _ in range(4):
        own, unit = stretches_of([("", nn.Linear(3, 3))]), _Unit()
        refuse_aliases(own, ())
        remember(own, unit)
        units.append(unit)
    assert compared == [0] * 4


def test_memory_of_a_unit_that_is_gone_counts_no_more(compared: list[int]) -> None:
    linear = nn.Linear(3, 3, bias=False)
    tied = nn.Linear(3, 3, bias=False)
    tied.weight = nn.Parameter(linear.weight.detach().t())
    unit = _Unit()
    remember(stretches_of([("first", linear)]), unit)
    with pytest.raises(NotImplementedError, match="must not share memory"):
        refuse_aliases(stretches_of([("second", tied)]), ())
    del unit
    gc.collect()
    refuse_aliases(stretches_of([("second", tied)]), ())
    assert compared == [1, 0]
