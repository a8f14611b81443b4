"""The number of microbatches of a step, of one batch size or of a schedule, under Megatron-Core's names.

What ``init_num_microbatches_calculator`` made is remembered for code that asks for it; the training loop of this framework is
given its ``BatchConfig``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


class BatchSizeError(ValueError, AssertionError):
    """Batch sizes that do not fit; Megatron-Core raises an AssertionError."""


class NumMicroBatchesCalculator:
    """Batch sizes by consumed samples.

    Args:
        schedule: [(samples from which on it holds, global batch size)], the first from 0 on.
        decrease_batch_size_if_needed: batch sizes that are no multiple of a microbatch of all ranks are rounded down.

    Raises:
        ValueError: the schedule is malformed, or its only batch size is no multiple. Of several, those that are behind may fit
            fewer ranks than there are now, so ``update`` checks the one that is at work.
    """

    def __init__(
        self,
        schedule: Sequence[tuple[int, int]],
        micro_batch_size: int,
        data_parallel_size: int,
        decrease_batch_size_if_needed: bool = False,
    ) -> None:
        starts = [start for start, _ in schedule]
        if not starts or starts[0] != 0 or sorted(set(starts)) != starts:
            raise ValueError(f"a schedule must begin at 0 samples and go up, got {list(schedule)}")
        self.schedule, self.micro_batch_size = list(schedule), micro_batch_size
        self.micro_batch_times_data_parallel_size = micro_batch_size * data_parallel_size
        self.decrease_batch_size_if_needed = decrease_batch_size_if_needed
        self.global_batch_size = schedule[-1][1]
        self.current_global_batch_size = self.current_running_global_batch_size = self.num_micro_batches = 0
        self.update(0, len(self.schedule) == 1)

    def update(self, consumed_samples: int, consistency_check: bool, verbose: bool = False) -> None:
        """Take the batch size of the schedule for the step after ``consumed_samples``.

        Raises:
            ValueError: with ``consistency_check``, it is no multiple of a microbatch of all ranks, or smaller than one. Without it,
            the latter gives no microbatches.
        """
        size = next(size for start, size in reversed(self.schedule) if consumed_samples >= start)
        parts = self.micro_batch_times_data_parallel_size
        running = size // parts * parts
        if consistency_check and (running == 0 or (running != size and not self.decrease_batch_size_if_needed)):
            raise BatchSizeError(
                f"the global batch size must be a multiple of micro_batch_size ({self.micro_batch_size}) * data_parallel_size "
                f"({parts // self.micro_batch_size}), got {size} = {size // parts} * {parts} + {size % parts}"
            )
        self.current_global_batch_size, self.num_micro_batches = size, running // parts
        self.current_running_global_batch_size = running if self.decrease_batch_size_if_needed else size

    def get(self) -> int:
        """Return the number of microbatches of each rank."""
        return self.num_micro_batches

    def get_current_global_batch_size(self) -> int:
        """Return the global batch size of the schedule."""
        return self.current_global_batch_size

    def get_current_running_global_batch_size(self) -> int:
        """Return the global batch size that is trained on, which may be rounded down."""
        return self.current_running_global_batch_size

    def get_micro_batch_size(self) -> int:
        """Return the samples of a microbatch."""
        return self.micro_batch_size


class ConstantNumMicroBatchesCalculator(NumMicroBatchesCalculator):
    """One batch size."""

    def __init__(
        self,
        global_batch_size: int,
        micro_batch_size: int,
        data_parallel_size: int,
        decrease_batch_size_if_needed: bool,
        rank: int,
    ) -> None:
        schedule = [(0, global_batch_size)]
        super().__init__(schedule, micro_batch_size, data_parallel_size, decrease_batch_size_if_needed)


class StepBatchsizeNumMicroBatchesCalculator(NumMicroBatchesCalculator):
    """Batch sizes by a text such as "0:32 10M:64"; see ``parse_schedule``."""

    def __init__(
        self,
        micro_batch_size: int,
        data_parallel_size: int,
        decrease_batch_size_if_needed: bool,
        rank: int,
        schedule: str,
        seq_length: int | None = None,
    ) -> None:
        if decrease_batch_size_if_needed:
            raise ValueError("decrease_batch_size_if_needed must be False with a step batch size schedule, got True")
        super().__init__(parse_schedule(schedule, seq_length), micro_batch_size, data_parallel_size)


def parse_schedule(schedule: str, seq_length: int | None = None) -> list[tuple[int, int]]:
    """Read "START:SIZE START:SIZE ...", separated by spaces or commas, as [(samples, global batch size)].

    Args:
        seq_length: starts are tokens of sequences of this length; None: they are samples.

    Raises:
        ValueError: an entry is malformed.
    """
    entries = []
    for entry in schedule.replace(",", " ").split():
        start, colon, size = entry.partition(":")
        if not colon:
            raise ValueError(f"an entry of a batch size schedule must be START:SIZE, got {entry!r}")
        entries.append((_number(start) // (seq_length or 1), _number(size)))
    return sorted(entries)


def _number(text: str) -> int:
    unit = _UNITS.get(text[-1:].upper(), 1)
    return int(float(text[:-1] if unit > 1 else text) * unit)


def ramp_up(start: int, increment: int, samples: int, global_batch_size: int) -> list[tuple[int, int]]:
    """Return the schedule that grows from ``start`` by ``increment`` in equal steps, over this many samples.

    Raises:
        ValueError: the increments do not lead from the first size to the last.
    """
    steps, rest = divmod(global_batch_size - start, increment) if increment > 0 else (0, 1)
    if start < 1 or steps < 0 or rest:
        raise ValueError(
            f"rampup_batch_size must lead to the global batch size {global_batch_size} in whole increments, got {start} and "
            f"increments of {increment}"
        )
    # A size ends when more samples than its share have been consumed, as in Megatron-LM.
    first = [0] if steps == 0 else [-(-samples * index // steps) for index in range(steps + 1)]
    return [(begin, start + index * increment) for index, begin in enumerate(first)]


_GLOBAL_NUM_MICROBATCHES_CALCULATOR: NumMicroBatchesCalculator | None = None
"""What ``init_num_microbatches_calculator`` made. Megatron-Core's callers set it to None, too."""


def _calculator() -> NumMicroBatchesCalculator:
    if _GLOBAL_NUM_MICROBATCHES_CALCULATOR is None:
        raise AssertionError("the batch sizes must be known first; call init_num_microbatches_calculator")
    return _GLOBAL_NUM_MICROBATCHES_CALCULATOR


def reconfigure_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: Sequence[int] | None = None,
    global_batch_size: int | None = None,
    micro_batch_size: int | None = None,
    data_parallel_size: int | None = None,
    decrease_batch_size_if_needed: bool = False,
    step_batch_size_schedule: str | None = None,
    seq_length: int | None = None,
) -> None:
    """Remember the batch sizes of a run, in place of those that are known.

    Args:
        rank: accepted; nothing is printed.
        rampup_batch_size: (first size, increment, samples over which it grows).
        step_batch_size_schedule, seq_length: see ``parse_schedule``; instead of ``global_batch_size``.

    Raises:
        ValueError: a size is missing or no multiple of a microbatch of all ranks.
    """
    global _GLOBAL_NUM_MICROBATCHES_CALCULATOR
    if micro_batch_size is None or data_parallel_size is None:
        raise ValueError(
            f"micro_batch_size and data_parallel_size must be given, got {micro_batch_size} and {data_parallel_size}"
        )
    if step_batch_size_schedule is not None:
        _GLOBAL_NUM_MICROBATCHES_CALCULATOR = StepBatchsizeNumMicroBatchesCalculator(
            micro_batch_size,
            data_parallel_size,
            decrease_batch_size_if_needed,
            rank,
            step_batch_size_schedule,
            seq_length,
        )
        return
    if global_batch_size is None:
        raise ValueError("global_batch_size or step_batch_size_schedule must be given, got None for both")
    if rampup_batch_size is None:
        _GLOBAL_NUM_MICROBATCHES_CALCULATOR = ConstantNumMicroBatchesCalculator(
            global_batch_size, micro_batch_size, data_parallel_size, decrease_batch_size_if_needed, rank
        )
        return
    first, increment, samples = map(int, rampup_batch_size)
    _GLOBAL_NUM_MICROBATCHES_CALCULATOR = NumMicroBatchesCalculator(
        ramp_up(first, increment, samples, global_batch_size),
        micro_batch_size,
        data_parallel_size,
        decrease_batch_size_if_needed,
    )


@functools.wraps(reconfigure_num_microbatches_calculator, assigned=())  # its parameters
def init_num_microbatches_calculator(*args: Any, **kwargs: Any) -> None:
    """Remember the batch sizes of a run; arguments and errors as for ``reconfigure_...``.

    Raises:
        AssertionError: they are known already.
    """
    if _GLOBAL_NUM_MICROBATCHES_CALCULATOR is not None:
        raise AssertionError("the batch sizes must be set once; call reconfigure_num_microbatches_calculator")
    reconfigure_num_microbatches_calculator(*args, **kwargs)


def destroy_num_microbatches_calculator() -> None:
    """Forget the batch sizes."""
    global _GLOBAL_NUM_MICROBATCHES_CALCULATOR
    _GLOBAL_NUM_MICROBATCHES_CALCULATOR = None


unset_num_microbatches_calculator = destroy_num_microbatches_calculator


def get_num_microbatches() -> int:
    """Return the number of microbatches of each rank."""
    return _calculator().get()


def get_current_global_batch_size() -> int:
    """Return the global batch size of the schedule."""
    return _calculator().get_current_global_batch_size()


def get_current_running_global_batch_size() -> int:
    """Return the global batch size that is trained on, which may be rounded down."""
    return _calculator().get_current_running_global_batch_size()


def get_micro_batch_size() -> int:
    """Return the samples of a microbatch."""
    return _calculator().get_micro_batch_size()


def update_num_microbatches(consumed_samples: int, consistency_check: bool = True, verbose: bool = False) -> None:
    """Take the batch size of the schedule for the step after ``consumed_samples``."""
    _calculator().update(consumed_samples, consistency_check, verbose)
