"""Garbage is collected only at the configured times."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from megatron.training.loop.garbage import GarbageCollector, GarbageConfig


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 0),
        ({"manual": True}, 1 + 2),
        ({"manual": True, "interval": 2}, 1 + 2 + 2),
        ({"manual": True, "at_evaluation": False}, 1),
    ],
)
def test_number_of_collections(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], expected: int) -> None:
    collected: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(1))
    garbage = GarbageCollector(GarbageConfig(**settings))
    assert gc.isenabled() is not settings.get("manual", False)
    for iteration in range(1, 5):
        garbage.after_step(iteration)
    garbage.around_evaluation()
    garbage.around_evaluation()
    garbage.close()
    assert gc.isenabled()
    assert len(collected) == expected


def test_settings_that_do_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="needs --manual-gc"):
        GarbageConfig(interval=3)
    with pytest.raises(ValueError, match="must not be negative"):
        GarbageConfig(manual=True, interval=-1)
