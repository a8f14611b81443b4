"""Warnings of all ranks, brought to rank 0 through the store: Python's own and those that are logged."""

from __future__ import annotations

import logging
import queue
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch.distributed import PrefixStore, Store

_MAX_WARNINGS = 20
"""Of a rank: who warns more often says nothing new, and the store must not fill."""

_MAX_TEXT = 500
_NUMBER = "number"


class WarningBox:
    """The place in the store where ranks leave their warnings.

    Args:
        store: that all ranks reach; a connection of its own is made to it.
        name: of this start of the run; keys begin with it.

    Ranks: any; each call blocks until the store has answered.
    """

    def __init__(self, store: Store, *, name: str) -> None:
        self._store = PrefixStore(f"{name}/warnings", store.clone())  # type: ignore[attr-defined]
        self._read = 0

    def put(self, text: str) -> None:
        """Leave a warning."""
        number = self._store.add(_NUMBER, 1) - 1
        self._store.set(str(number), text)

    def take(self) -> list[str]:
        """Return what has been left since the last call; nothing if the store is gone. Ranks: one."""
        texts: list[str] = []
        with suppress(RuntimeError):
            # A rank may have taken a number and not yet left its text.
            while self._read < self._store.add(_NUMBER, 0) and self._store.check([str(self._read)]):
                texts.append(self._store.get(str(self._read)).decode(errors="replace"))
                self._read += 1
        return texts


@contextmanager
def passing_on_warnings(rank: int, tell: Callable[[str], None]) -> Iterator[None]:
    """Tell of each warning of this rank within the scope, once, in a thread, so that nobody waits for it.

    Args:
        tell: takes the text, which begins with the rank; what it raises ends the telling.

    Ranks: each alone.
    """
    texts: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    seen: set[str] = set()

    def note(text: str) -> None:
        text = f"rank {rank}: {text}"[:_MAX_TEXT]
        if text not in seen and len(seen) < _MAX_WARNINGS:
            seen.add(text)
            texts.put(text)

    def pass_on() -> None:
        while (text := texts.get()) is not None:
            try:
                tell(text)
            except RuntimeError:  # the store is gone: so is rank 0, or the run ends
                return

    thread = threading.Thread(target=pass_on, name="warnings", daemon=True)
    thread.start()
    handler, shown = _Handler(note), warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any, **others: Any) -> None:
        note(f"{category.__name__}: {message}")
        shown(message, category, *place, **others)

    logging.getLogger().addHandler(handler)
    warnings.showwarning = show
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        if warnings.showwarning is show:  # else another one stands before it, and goes on to call it
            warnings.showwarning = shown
        texts.put(None)
        thread.join(timeout=1.0)


class _Handler(logging.Handler):
    """Notes warnings and errors that are logged."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__(level=logging.WARNING)
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        self._note(f"{record.levelname} of {record.name}: {record.getMessage()}")
