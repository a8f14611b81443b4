"""Functions of nested dicts and lists."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Nested = dict[Any, Any] | list[Any]


def dict_list_map_inplace(f: Callable[[Any], Any], x: Any) -> Any:
    """Replace each leaf by ``f`` of it, in place."""
    if isinstance(x, dict):
        for key, value in x.items():
            x[key] = dict_list_map_inplace(f, value)
        return x
    if isinstance(x, list):
        x[:] = [dict_list_map_inplace(f, value) for value in x]
        return x
    return f(x)


def dict_list_map_outplace(f: Callable[[Any], Any], x: Any) -> Any:
    """Return a copy of the structure with ``f`` of each leaf."""
    if isinstance(x, dict):
        return {key: dict_list_map_outplace(f, value) for key, value in x.items()}
    return [dict_list_map_outplace(f, value) for value in x] if isinstance(x, list) else f(x)


def nested_values(x: Nested) -> Iterator[Any]:
    """Yield the leaves, in order."""
    for value in x.values() if isinstance(x, dict) else x:
        if isinstance(value, dict | list):
            yield from nested_values(value)
        else:
            yield value


def nested_items_iter(x: Nested) -> Iterator[tuple[Nested, Any, Any]]:
    """Yield (container, key or index, leaf), in order."""
    for key, value in x.items() if isinstance(x, dict) else enumerate(x):
        if isinstance(value, dict | list):
            yield from nested_items_iter(value)
        else:
            yield x, key, value


def extract_matching_values(
    x: Nested, predicate: Callable[[Any], bool], return_lists_as_dicts: bool = False
) -> tuple[Nested, Nested]:
    """Split a structure into the leaves that match and the others; empty containers are of the others.

    Args:
        return_lists_as_dicts: lists become dicts by index, so that positions are not lost.
    """
    is_list = isinstance(x, list)
    matching: dict[Any, Any] = {}
    others: dict[Any, Any] = {}
    for key, value in enumerate(x) if is_list else x.items():  # type: ignore[union-attr]
        if isinstance(value, dict | list) and value:
            match, rest = extract_matching_values(value, predicate, return_lists_as_dicts)
            matching |= {key: match} if match else {}
            others |= {key: rest} if rest else {}
        else:
            (matching if not isinstance(value, dict | list) and predicate(value) else others)[key] = value
    if is_list and not return_lists_as_dicts:
        return list(matching.values()), list(others.values())
    return matching, others


def merge(x1: Any, x2: Any, key: tuple[str | int, ...] = ()) -> Any:
    """Add the leaves of ``x2`` to ``x1``, in place, and return it; a dict by index joins a list.

    Raises:
        ValueError: both have a leaf at one place.
    """
    if isinstance(x1, dict) and isinstance(x2, dict):
        for name, value in x2.items():
            x1[name] = merge(x1[name], value, (*key, name)) if name in x1 else value
        return x1
    if isinstance(x1, list) and isinstance(x2, list) and len(x1) == len(x2):
        x1[:] = [merge(one, other, (*key, index)) for index, (one, other) in enumerate(zip(x1, x2, strict=True))]
        return x1
    raise ValueError(f"one value must be at each place, got two at {'.'.join(map(str, key)) or 'the top'}")
