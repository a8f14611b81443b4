"""The end of a run that failed: all ranks end soon after the first one, and each says which one that was."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from megatron.core.child_process import end_with_parent
from megatron.training.launch.refusals import StartRefusedError
from megatron.training.launch.rendezvous import Rendezvous, meet, world_size_of_environment
from megatron.training.launch.same_settings import report_refusal
from megatron.training.telemetry.life_signs import LifeSigns

_GRACE_S = 2.0
"""Seconds in which a rank may end by itself, with its own error, after another one has announced its failure."""

_FAREWELL_S = 3.0
"""Seconds in which the rank that serves the store waits for the others to read why the run ends."""

_NOTED_S = 4.0
"""Seconds in which the rank that keeps the status page may note a failure; it looks every other second."""

_STALL = 0.9
"""Part of the time-out of collectives after which a rank without progress says what it waits for."""

_MEETING = timedelta(minutes=1)
"""How long a rank that refuses its command line waits for the others."""

_SMALL_WORLD = 256
"""Up to this many ranks, all of them ask which are silent; in larger runs the first rank of each host asks."""


@contextmanager
def ending_together(rendezvous: Rendezvous) -> Iterator[LifeSigns | None]:
    """End all ranks, within the scope, when one of them raises, and say in each error which rank failed first or is silent.

    A rank that waits in a collective cannot raise, so its process ends, with a line on stderr. It works where the ranks use
    a TCP store, as with torchrun; otherwise only the error itself ends a rank.

    Yields:
        The signs of life of this rank, for the report of all ranks after a time-out; None where there are none.

    Ranks: all of the run.
    Source: ours.
    """
    if rendezvous.world_size == 1 or not isinstance(rendezvous.connection, TCPStore):
        yield None
        return
    end = _EndWithOthers(rendezvous)
    try:
        yield end.signs
    except BaseException as error:
        end.fail(error)
        raise
    finally:
        end.signs.close()


class _EndWithOthers:
    """The signs of life of this rank, and what it does when it fails or another one has."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.rendezvous, self.has_failed = rendezvous, False
        self.signs = LifeSigns(
            rendezvous.connection,
            rank=rendezvous.rank,
            world_size=rendezvous.world_size,
            name=rendezvous.name,
            server=rendezvous.where,
            watches=rendezvous.rank == 0,
            on_failure=self._end_soon,
            stall_s=_STALL * rendezvous.timeout.total_seconds(),
        )

    def fail(self, error: BaseException) -> None:
        """Announce the error, or add to it which rank has failed before or is silent."""
        self.has_failed = True
        if not isinstance(error, StartRefusedError):  # which all ranks raise
            self._explain(error)
            self._leave()

    def _explain(self, error: BaseException) -> None:
        rank, signs = self.rendezvous.rank, self.signs
        if (first := signs.failure()) is None:
            asks = self.rendezvous.world_size <= _SMALL_WORLD or os.environ.get("LOCAL_RANK", "0") == "0"
            if asks and _is_of_communication(error):
                error.add_note(f"rank {rank} waited at {signs.where}; {signs.describe()}")
            own = "\n".join((f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())))
            first = signs.announce_failure(f"rank {rank} failed with {own}")
            signs.wait_until_noted(_NOTED_S)
        if not first.startswith(f"rank {rank} "):
            error.add_note(f"before this, {first}")

    def _end_soon(self, failure: str) -> None:
        """End this process, unless it does so by itself. From the thread of the signs of life."""
        if self.signs.closed(within_s=_GRACE_S) or self.has_failed:
            return
        self._leave()
        print(f"rank {self.rendezvous.rank} ends, since {failure}", file=sys.stderr)
        end_process(1)

    def _leave(self) -> None:
        self.signs.leave(waits_s=_FAREWELL_S if self.rendezvous.serves else 0.0)


def run_script(main: Callable[[Sequence[str]], int], argv: Sequence[str]) -> NoReturn:
    """Call ``main`` and end the process with its status; after an exception at once, with the traceback as the last words.

    Nothing may keep the process of a failed rank alive, since other ranks, and torchrun, wait for its end: neither loader
    processes, nor threads, nor the destructors of communicators. A rank whose torchrun has ended gets SIGTERM.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # A killed torchrun cannot end its ranks: they would keep training, and nothing could end or restart them.
        end_with_parent(os.getppid(), signal.SIGTERM)
    try:
        status = main(argv)
    except SystemExit:
        raise
    except BaseException as error:
        if os.environ.get("TORCHELASTIC_ERROR_FILE"):  # from which torchrun reports the first failure
            get_error_handler().record_exception(error)
        sys.excepthook(*sys.exc_info())
        end_process(1)
    if status != 0:
        end_process(status)
    sys.exit(0)


def refuse(text: str, report: Callable[[str], None]) -> None:
    """Report why this rank refuses its command line, once where all ranks refuse it, and make the other ranks end.

    Ranks: those that refuse.
    """
    if world_size_of_environment() == 1:
        report(text)
        return
    try:
        rendezvous = meet(_MEETING)
    except RuntimeError:
        report(text)
        raise
    report_refusal(text, rendezvous, report)


def end_process(status: int) -> NoReturn:
    """End this process and those that it started, without waiting for anything."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(status)


def _is_of_communication(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in text for word in ("gloo", "nccl", "connection", "timed out"))
    )
