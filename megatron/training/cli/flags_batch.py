"""Flags of batches and of the length of training; names, types and defaults are Megatron-LM's."""

from __future__ import annotations

import argparse
from argparse import Namespace
from typing import Any

from megatron.training.cli.flag_rows import F, FlagGroup
from megatron.training.cli.flags_data import unquoted
from megatron.training.data.batches import BatchConfig

_FACTORS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


class _Text(argparse.Action):
    """Keeps a list as the text that Megatron-LM has."""

    def __call__(self, parser: Any, namespace: Namespace, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, " ".join(values))


BATCH_FLAGS = FlagGroup(
    "batches and length of training",
    F("--micro-batch-size", "samples of a rank in one microbatch"),
    F("--global-batch-size", "samples of a step (default: micro batch size * data-parallel ranks)"),
    F(
        "--rampup-batch-size",
        "start, increment and samples: the global batch size grows from start by increments to "
        "--global-batch-size, over so many samples",
    ),
    F(
        "--step-batch-size-schedule",
        "global batch sizes by the tokens that are consumed, as in '0:384 200B:768 400B:1152' (K, M, B "
        "and T are factors)",
        action=_Text,
        nargs="+",
        type=unquoted,
    ),
    F("--eval-global-batch-size", "samples of a batch of an evaluation (default: --global-batch-size)"),
    F("--eval-micro-batch-size", "samples of a rank in one microbatch of an evaluation (default: --micro-batch-size)"),
    F("--train-iters", "iterations to train, over all runs"),
    F("--train-samples", "samples to train, over all runs, in whole global batches; instead of --train-iters"),
    F("--seed", "seed of initial weights, data order and dropout"),
    F("--calculate-per-token-loss", "the loss is the mean over all tokens of the global batch, not over microbatches"),
)


def batch_config(args: Namespace, data_parallel_size: int) -> BatchConfig:
    """Map the flags of the global batch; its size may grow while training goes on.

    Raises:
        ValueError: sizes do not fit each other or the ranks.
    """
    schedule = _schedule(args)
    size = args.micro_batch_size * data_parallel_size if args.global_batch_size is None else args.global_batch_size
    return BatchConfig(
        micro_batch_size=args.micro_batch_size,
        global_batch_size=schedule[-1][1] if schedule else size,
        data_parallel_size=data_parallel_size,
        schedule=schedule if len(schedule) > 1 else (),
    )


def eval_batch_config(args: Namespace, batch: BatchConfig) -> BatchConfig:
    """Map the flags of the batches of evaluations.

    Raises:
        ValueError: the size does not fit the ranks.
    """
    size = batch.global_batch_size if args.eval_global_batch_size is None else args.eval_global_batch_size
    micro = batch.micro_batch_size if args.eval_micro_batch_size is None else args.eval_micro_batch_size
    ranks = batch.data_parallel_size
    if min(size, micro) < 1 or size % (micro * ranks) != 0:
        raise ValueError(
            "--eval-global-batch-size must be a multiple of --eval-micro-batch-size times the data-parallel ranks, got "
            f"{size} and {micro} * {ranks} = {micro * ranks}; what is left out is as in training"
        )
    return BatchConfig(micro_batch_size=micro, global_batch_size=size, data_parallel_size=ranks)


def _schedule(args: Namespace) -> tuple[tuple[int, int], ...]:
    """Return (consumed samples, global batch size), ascending; empty if the size is constant."""
    if args.step_batch_size_schedule is not None:
        return _of_steps(args.step_batch_size_schedule, args.seq_length, args.global_batch_size)
    return () if args.rampup_batch_size is None else _of_ramp(args.rampup_batch_size, args.global_batch_size)


def _of_steps(text: str, seq_length: int, last: int | None) -> tuple[tuple[int, int], ...]:
    entries = text.replace(",", " ").split()
    try:
        steps = sorted((_number(start) // seq_length, _number(size)) for start, size in (e.split(":") for e in entries))
    except ValueError:
        steps = []
    starts = [start for start, _ in steps]
    if not steps or starts[0] != 0 or len(set(starts)) < len(starts):
        raise ValueError(
            "--step-batch-size-schedule must be TOKENS:SIZE pairs with different numbers of tokens, one of them 0, as in "
            f"'0:384 200B:768', got {text!r}"
        )
    if last not in (None, steps[-1][1]):
        raise ValueError(
            "--global-batch-size must be left out with --step-batch-size-schedule, or be its last size, got "
            f"{last} and {text!r}"
        )
    return tuple(steps)


def _number(text: str) -> int:
    factor = _FACTORS.get(text[-1:].upper(), 1)
    return int(float(text if factor == 1 else text[:-1]) * factor)


def _of_ramp(ramp: list[int], last: int | None) -> tuple[tuple[int, int], ...]:
    start, increment, samples = ramp
    if last is None or min(start, increment) < 1 or samples < 0 or last < start or (last - start) % increment:
        raise ValueError(
            "--rampup-batch-size must be a start, an increment and a number of samples, with --global-batch-size a number of "
            f"increments above the start, got {start}, {increment}, {samples} and {last}"
        )
    count = (last - start) // increment
    # In equal parts of the samples; where several begin at the same sample, the last one counts.
    return tuple(
        {-(-index * samples // max(1, count)): start + index * increment for index in range(count + 1)}.items()
    )
