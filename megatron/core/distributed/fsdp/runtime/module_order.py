"""The order of sharded modules as their tree says it, which Megatron-FSDP prefetches by; here the recorded plan does that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from torch import nn

from megatron.core.distributed.fsdp.runtime.unit import FsdpUnit

ItemT = TypeVar("ItemT")


class IndexedOrder(Generic[ItemT]):
    """Different items in order, each with the one after it.

    Source: the class of this name of the package megatron-fsdp (methods).
    """

    def __init__(self) -> None:
        self._places: dict[ItemT, int] = {}
        self._items: list[ItemT] = []

    def append(self, item: ItemT) -> None:
        """Add an item at the end.

        Raises:
            ValueError: it is there already.
        """
        if item in self._places:
            raise ValueError(f"items of an order must be different, got {item!r} twice")
        self._places[item] = len(self._items)
        self._items.append(item)

    def __iter__(self) -> Iterator[ItemT]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def next_item(self, item: ItemT) -> ItemT | None:
        """Return the item after this one; None after the last.

        Raises:
            KeyError: it is not in the order.
        """
        place = self._places[item] + 1
        return self._items[place] if place < len(self._items) else None


def root_modules(units: Iterable[FsdpUnit]) -> list[nn.Module]:
    """Return the modules of these units that lie in no other one's, in the order of the units."""
    modules = _modules_of(units)
    inside = {inner for module in modules for inner in module.modules() if inner is not module}
    return [module for module in modules if module not in inside]


def forward_order(units: Iterable[FsdpUnit]) -> IndexedOrder[nn.Module]:
    """Return the units' modules, root after root, outer before inner ones, children in order."""
    return _ordered(list(units), backward=False)


def backward_order(units: Iterable[FsdpUnit]) -> IndexedOrder[nn.Module]:
    """Return the units' modules, last root first, outer before inner ones, the last child first."""
    return _ordered(list(units), backward=True)


def _modules_of(units: Iterable[FsdpUnit]) -> list[nn.Module]:
    return [module for unit in units for member in unit.members if (module := member()) is not None]


def _ordered(units: list[FsdpUnit], *, backward: bool) -> IndexedOrder[nn.Module]:
    order: IndexedOrder[nn.Module] = IndexedOrder()
    sharded, seen, waiting = set(_modules_of(units)), set[nn.Module](), root_modules(units)
    # A stack: its last is the next one.
    waiting = waiting if backward else waiting[::-1]
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        if module in sharded:
            order.append(module)
        children = list(module.children())
        waiting += children if backward else children[::-1]
    return order
