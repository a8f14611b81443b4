"""Work that a thread of the host does for a group: an event that is not there yet."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class HostWork:
    """An event that a thread will record; who waits for it blocks the host until it is recorded.

    Args:
        start: begins the thread's work if it has not begun.
    """

    __slots__ = ("_event", "_start")

    def __init__(self, start: Callable[[], None]) -> None:
        self._start = start
        self._event: Future[Any] = Future()

    def done(self, event: Any) -> None:
        """Say that the work is issued up to ``event``, None if it is over."""
        self._event.set_result(event)

    def failed(self, error: BaseException) -> None:
        """Let who waits raise ``error``, unless the work is done."""
        if not self._event.done():
            self._event.set_exception(error)

    def event(self) -> Any:
        """Return the event, None if nothing is to be waited for; blocks the host."""
        self._start()
        return self._event.result()
