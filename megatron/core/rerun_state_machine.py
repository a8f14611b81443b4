"""Megatron-Core's check of results, without its second run of a suspicious step.

Served is the mode ``disabled``: each step runs once, and a result that a check rejects stops the run or is logged.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterator
from typing import Any

from megatron.core._rank_utils import safe_get_rank

_logger = logging.getLogger(__name__)


class RerunMode(enum.StrEnum):
    """What is done about results that are rejected; only ``DISABLED`` is served."""

    DISABLED = "disabled"
    VALIDATE_RESULTS = "validate_results"
    REPORT_DETERMINISM_STATS = "report_determinism_stats"


class RerunDataIterator:
    """An iterator of microbatches under the name by which Megatron-Core's training loop knows it.

    Args:
        iterable: the iterator that gives the microbatches.
    """

    def __init__(self, iterable: Iterator[Any]) -> None:
        self.iterable = iterable

    def __iter__(self) -> RerunDataIterator:
        return self

    def __next__(self) -> Any:
        return next(self.iterable)


class RerunStateMachine:
    """Lets each step run once, and checks results.

    Args:
        mode: must be ``RerunMode.DISABLED``.
        state_save_func, state_restore_func, result_rejected_tracker_filename: of use only to run a step again; ignored.
        error_injector: must be None.

    Raises:
        NotImplementedError: another mode, or an injector of errors, is asked for.

    Source: Megatron-Core's RerunStateMachine (names and signatures).
    """

    def __init__(
        self,
        state_save_func: Callable[[], Any] | None = None,
        state_restore_func: Callable[[Any], None] | None = None,
        mode: RerunMode = RerunMode.DISABLED,
        error_injector: None = None,
        result_rejected_tracker_filename: str | None = None,
    ) -> None:
        if error_injector is not None:
            raise NotImplementedError("RerunStateMachine(error_injector=...) is not served: no step is run twice")
        self.set_mode(mode)
        self.current_iteration = -1
        self._in_step = False

    def set_mode(self, mode: RerunMode) -> None:
        """Accept the mode ``disabled``.

        Raises:
            NotImplementedError: it is another one.
        """
        if RerunMode(mode) is not RerunMode.DISABLED:
            raise NotImplementedError(
                f"rerun mode {RerunMode(mode).value!r} is not served: no step is run twice; use 'disabled'"
            )
        self.mode = RerunMode.DISABLED

    def get_mode(self) -> RerunMode:
        """Return the mode, which is ``disabled``."""
        return self.mode

    def should_run_forward_backward(self, data_iterator: Any) -> bool:
        """Return True and False in turn, so that a loop over it runs each step once."""
        self._in_step = not self._in_step
        self.current_iteration += self._in_step
        return self._in_step

    def should_checkpoint_and_exit(self) -> tuple[bool, bool, int]:
        """Return (save a checkpoint, exit, exit code), which is never asked for."""
        return False, False, 0

    def validate_result(
        self,
        result: Any,
        rejection_func: Callable[[Any], Any],
        message: str,
        comparison_func: Callable[[Any, Any], float] | None = None,
        tolerance: float = 0.0,
        fatal: bool = True,
    ) -> None:
        """Check a result; ``comparison_func`` and ``tolerance`` concern a second run, so they are ignored.

        Args:
            rejection_func: returns whether a result is unacceptable (``torch.isnan``).
            message: what was checked.
            fatal: raise; False: log a warning.

        Raises:
            RuntimeError: the result is rejected, and that is fatal.
        """
        if not rejection_func(result):
            return
        text = f"rank {safe_get_rank()}, iteration {self.current_iteration + 1}: rejected result {result} ({message})"
        if fatal:
            raise RuntimeError(text)
        _logger.warning(text)


_machine: dict[str, RerunStateMachine] = {}


def initialize_rerun_state_machine(*args: Any, **kwargs: Any) -> None:
    """Make the process's machine; arguments are those of ``RerunStateMachine``.

    Raises:
        RuntimeError: there is one already.
    """
    if _machine:
        raise RuntimeError("the rerun state machine exists already; call destroy_rerun_state_machine first")
    _machine["default"] = RerunStateMachine(*args, **kwargs)


def destroy_rerun_state_machine() -> None:
    """Forget the process's machine."""
    _machine.clear()


def get_rerun_state_machine() -> RerunStateMachine:
    """Return the process's machine, made now if there is none."""
    if not _machine:
        initialize_rerun_state_machine()
    return _machine["default"]
