"""Python's logging, and a run's progress log, under Megatron-LM's names."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import partial
from pathlib import Path

import torch.distributed as dist

from megatron.core._rank_utils import safe_get_rank, safe_get_world_size

_LEVEL = "MEGATRON_LOGGING_LEVEL"
Filter = logging.Filter | Callable[[logging.LogRecord], bool]


def warning_filter(record: logging.LogRecord) -> bool:
    """Return whether a record is no warning."""
    return record.levelno != logging.WARNING


def module_filter(record: logging.LogRecord, modules_to_filter: Iterable[str]) -> bool:
    """Return whether a record is of none of the loggers whose names begin so."""
    return not record.name.startswith(tuple(modules_to_filter))


def add_filter_to_all_loggers(filter: Filter) -> None:
    """Add a filter to the root logger and all that there are."""
    for name in (None, *logging.root.manager.loggerDict):
        logging.getLogger(name).addFilter(filter)


def setup_logging(
    logging_level: int | None = None,
    filter_warning: bool = True,
    modules_to_filter: list[str] | None = None,
    set_level_for_all_loggers: bool = False,
) -> None:
    """Set the root logger's level, and leave records out.

    Args:
        logging_level: None: that of MEGATRON_LOGGING_LEVEL, or INFO.
        filter_warning: leave out warnings.
        modules_to_filter: beginnings of names of loggers whose records are left out.
        set_level_for_all_loggers: set the level of all loggers that there are; off, of those of megatron.bridge.
    """
    level = int(os.environ.get(_LEVEL, logging.INFO)) if logging_level is None else logging_level
    logging.getLogger().setLevel(level)
    for name in logging.root.manager.loggerDict:
        if set_level_for_all_loggers or name.startswith("megatron.bridge"):
            logging.getLogger(name).setLevel(level)
    if filter_warning:
        add_filter_to_all_loggers(warning_filter)
    if modules_to_filter:
        add_filter_to_all_loggers(partial(module_filter, modules_to_filter=modules_to_filter))


def append_to_progress_log(save_dir: str | None, string: str, barrier: bool = True) -> None:
    """Append a line with time, job and number of ranks to ``progress.txt`` in a folder, on rank 0; None: nothing.

    Ranks: all, with ``barrier``.
    """
    if save_dir is None:
        return
    if barrier and dist.is_initialized():
        dist.barrier()
    if safe_get_rank() == 0:
        path = Path(save_dir) / "progress.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        job = os.environ.get("SLURM_JOB_ID", "")
        with path.open("a") as file:
            file.write(f"{_now()}\tJob ID: {job}\t# GPUs: {safe_get_world_size()}\t{string}\n")


def barrier_and_log(string: str) -> None:
    """Wait for all ranks, and print a text and the time on rank 0. Ranks: all."""
    if dist.is_initialized():
        dist.barrier()
    if safe_get_rank() == 0:
        print(f"[{string}] datetime: {_now()} ", flush=True)


def _now() -> str:
    return f"{datetime.now():%Y-%m-%d %H:%M:%S}"
