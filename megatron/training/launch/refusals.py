"""What all ranks refuse together before training starts: one message for the whole run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from megatron.core.distributed.fsdp.checkpoint import raised_on_all_ranks
from megatron.training.launch.rendezvous import Rendezvous

_PATIENCE = timedelta(seconds=5)
_POLL_S = 0.05

_IN_WORDS_OF_FLAGS = ("load_optimizer=False", "--no-load-optim")
"""What the engine's messages advise its callers, and what does it on a command line."""


class StartRefusedError(ValueError):
    """The run cannot start as it was asked to; raised on all ranks, with one message."""

    def __init__(self, message: str, rendezvous: Rendezvous) -> None:
        super().__init__(message)
        self.rendezvous = rendezvous

    def report_once(self, report: Callable[[str], None]) -> None:
        """Call ``report`` with the message on rank 0; the others return after it, so that nobody ends rank 0 before."""
        store, num_others = self.rendezvous.store, self.rendezvous.world_size - 1
        if self.rendezvous.rank > 0:
            with suppress(RuntimeError):  # rank 0, which serves the store, has ended
                store.wait(["refusal/reported"], _PATIENCE)
                store.add("refusal/readers", 1)
            return
        report(str(self))
        store.set("refusal/reported", "")
        deadline = time.monotonic() + _PATIENCE.total_seconds()
        while self.rendezvous.serves and store.add("refusal/readers", 0) < num_others and time.monotonic() < deadline:
            time.sleep(_POLL_S)


@contextmanager
def refusing_together(rendezvous: Rendezvous) -> Iterator[None]:
    """Raise what all ranks refuse within the scope as a ``StartRefusedError``, which is reported once.

    Other errors, and errors of code of ours or of the user's, pass with their tracebacks.

    Ranks: all of the run.
    """
    try:
        yield
    except (ValueError, OSError, NotImplementedError) as error:
        if not raised_on_all_ranks(error):
            raise
        raise StartRefusedError(str(error).replace(*_IN_WORDS_OF_FLAGS), rendezvous) from error
