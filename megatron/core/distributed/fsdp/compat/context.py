"""The attributes of Megatron-FSDP's context, as views of this engine's state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Generic, NoReturn, TypeVar

import torch
from torch import nn

from megatron.core.distributed.fsdp.comm.streams import Role
from megatron.core.distributed.fsdp.runtime.context import FsdpContext
from megatron.core.distributed.fsdp.runtime.unit import FsdpUnit

_REPLACEMENTS = {
    "register_module": "fully_shard in a fully_shard_context",
    "finalize": "nothing: the scope of fully_shard_context ends the construction",
    "register_post_backward_final_callback": "nothing: each backward ends by itself",
}
"""Attributes of Megatron-FSDP's context that are missing here, and their replacements."""

ItemT = TypeVar("ItemT")


class MegatronContext(FsdpContext):
    """A context with Megatron-FSDP's names. The engine prefetches by its recorded plan, not by these orders."""

    is_under_construction = False  # the scope that makes the units is open, so no forward may run

    def __getattr__(self, name: str) -> NoReturn:
        """Raise the AttributeError, with the replacement where Megatron-FSDP's context has the attribute."""
        instead = _REPLACEMENTS.get(name)
        hint = f": use {instead}" if instead else ""
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{hint}", name=name, obj=self)

    @property
    def allgather_stream(self) -> torch.cuda.Stream | None:
        """The stream of all-gathers; None on a device without streams."""
        stream: torch.cuda.Stream | None = self.streams.queues.get(Role.GATHER)
        return stream

    @property
    def reduce_scatter_stream(self) -> torch.cuda.Stream | None:
        """The stream of gradient reductions; None on a device without streams."""
        stream: torch.cuda.Stream | None = self.streams.queues.get(Role.REDUCE)
        return stream

    @property
    def unify_communication_stream(self) -> bool:
        """Whether all-gathers and reductions share a stream."""
        return self.streams.one_for_communication

    @property
    def forward_order(self) -> IndexedOrder[nn.Module]:
        """The sharded modules in depth-first order of the module tree; ``planner.plan`` has the order in which they ran."""
        return _ordered(self.units, backward=False)

    @property
    def backward_order(self) -> IndexedOrder[nn.Module]:
        """As ``forward_order``, but from the last root and the last child to the first."""
        return _ordered(self.units, backward=True)

    @property
    def root_module(self) -> nn.Module | None:
        """The module that contains all sharded modules; None if there is none, as for sibling roots."""
        roots = _root_modules(self.units)
        return roots[0] if len(roots) == 1 else None

    @property
    def use_symmetric_memory(self) -> bool:
        """Whether units that are made in its scope, and name no transport, use symmetric memory."""
        return self.options.use_symmetric_memory

    @property
    def is_first_microbatch(self) -> bool:
        """Whether the next forward reads the current main weights: False in a ``microbatch`` that is not the first of a step."""
        return self.state.is_first

    @property
    def is_last_microbatch(self) -> bool:
        """Whether a backward ends the step, that is, reduces gradients over all ranks."""
        return self.state.is_last

    @is_last_microbatch.setter
    def is_last_microbatch(self, value: bool) -> None:
        self.state.set_last(value)

    def current_stream(self) -> torch.cuda.Stream | None:
        """Return the current stream of the context's device; None on a device without streams."""
        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

    @contextmanager
    def under_construction(self) -> Iterator[None]:
        """Refuse forwards in this scope, in which units are made."""
        self.is_under_construction = True
        try:
            yield
        finally:
            self.is_under_construction = False

    def _begin_forward(self, unit: FsdpUnit) -> None:
        self.ensure_finalized()
        super()._begin_forward(unit)

    def ensure_finalized(self) -> None:
        """Check that the scope that makes the units has ended.

        Raises:
            RuntimeError: it is still open.
        """
        if self.is_under_construction:
            raise RuntimeError(
                "forward must run after the scope in which its units were made, got a call within it. Exit fully_shard_context first"
            )


class IndexedOrder(Generic[ItemT]):
    """Unique items in order, each with its successor.

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


def _root_modules(units: Iterable[FsdpUnit]) -> list[nn.Module]:
    """Return the modules of these units that no other unit's module contains, in the order of the units."""
    modules = _modules_of(units)
    inside = {inner for module in modules for inner in module.modules() if inner is not module}
    return [module for module in modules if module not in inside]


def _modules_of(units: Iterable[FsdpUnit]) -> list[nn.Module]:
    return [module for unit in units for member in unit.origin.members if (module := member()) is not None]


def _ordered(units: list[FsdpUnit], *, backward: bool) -> IndexedOrder[nn.Module]:
    order: IndexedOrder[nn.Module] = IndexedOrder()
    sharded, seen, waiting = set(_modules_of(units)), set[nn.Module](), _root_modules(units)
    # A stack: the last entry is visited next.
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
