"""Processes that this one starts end with it."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # loaded here, since little is safe between fork and exec


def end_with_parent(parent: int | None = None, by: signal.Signals = signal.SIGKILL) -> None:
    """Make the kernel end this process when the one that started it has ended, however that ended.

    Call it first in a child of ``multiprocessing`` with the start method ``spawn``, or as ``preexec_fn`` of a subprocess. A child
    of a parent that was killed lives on otherwise: a worker of a pool has both ends of its queue, so it waits forever.
    The thread that starts the child must live as long as the child is needed, since Linux takes the thread for the parent.

    Args:
        parent: the process that started this one; None: the one that ``multiprocessing`` knows.
        by: the signal that ends this process.

    Source: the manual page of prctl(2), ``PR_SET_PDEATHSIG``.
    """
    if parent is None:
        known = multiprocessing.parent_process()
        parent = None if known is None else known.pid
    _libc.prctl(_PR_SET_PDEATHSIG, by, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)  # the parent ended before, so no signal comes
