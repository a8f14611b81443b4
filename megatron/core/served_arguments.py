"""Arguments and fields of Megatron-Core that are taken at some values and refused at others, by tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Served = Mapping[str, tuple[tuple[object, ...], str]]
"""Maps a name to (values that are served, why others are not)."""

ANY: tuple[object, ...] = ()
"""Stands for all values: what the name says is always so here, or changes nothing."""


def check_arguments(owner: str, given: Mapping[str, Any], served: Served) -> None:
    """Check arguments that an owner only knows from its table.

    Raises:
        TypeError: a name is not in the table.
        NotImplementedError: a value is not served; the message names it and says why.
    """
    for name, value in given.items():
        if name not in served:
            raise TypeError(f"{owner} got an unexpected keyword argument {name!r}")
        refuse_value(owner, name, value, served)


def refuse_value(owner: str, name: str, value: object, served: Served) -> None:
    """Raise NotImplementedError where a value is not among those that are served."""
    if (text := refusal(owner, name, value, served)) is not None:
        raise NotImplementedError(text)


def refusal(owner: str, name: str, value: object, served: Served) -> str | None:
    """Return why a value is not served; None where it is."""
    values, reason = served[name]
    if values is ANY or any(value is one or _equal(value, one) for one in values):
        return None
    wanted = " or ".join(map(repr, values))
    return f"{owner}.{name} must be {wanted}, got {value!r}: {reason}"


def _equal(value: object, served: object) -> bool:
    return isinstance(value, bool) is isinstance(served, bool) and bool(value == served)
