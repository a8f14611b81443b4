"""What a candidate is planned to take, before it is tried."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

from megatron.core.child_process import end_with_parent


def planned_nbytes(words: Sequence[str], *, world_size: int) -> int | None:
    """Plan a launch line; return the bytes of its fullest device, None where they cannot be planned.

    In a process of its own, since a plan exchanges parts of torch for others. Ranks: one.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_without_devices) as pool:
        return pool.submit(plan_nbytes, tuple(words), world_size).result()


def _without_devices() -> None:
    end_with_parent()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    logging.disable(logging.WARNING)


def plan_nbytes(words: Sequence[str], world_size: int) -> int | None:
    """Plan in this process, which has no process groups; arguments as of ``planned_nbytes``."""
    # The planner builds models by code that calls the tuner.
    from megatron.training.arguments import check_command_line
    from megatron.training.planner import plan_run, rates_of

    settings = check_command_line(words, world_size=world_size).settings
    if settings is None or settings.tokenizer.vocab_size is None:
        return None
    try:
        return plan_run(settings, rates_of("h200")).device_nbytes
    except (RuntimeError, ValueError, NotImplementedError):
        return None  # what cannot be planned is tried
