"""Log lines have the format of Megatron-LM's logs."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

import pytest

from megatron.training.telemetry.log_line import LogRecord, format_evaluation, format_log_line

# As log parsers of Megatron-LM's users have it: a header, then "name: number" between bars.
_ITERATION = re.compile(r"\[.*?\]\s*iteration\s+(\d+)\s*/\s*(\d+)\s*\|(.+)")
_FIELD = re.compile(r"^\s*([^:]+?)\s*:\s*([+-]?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*$")


def _record(**changes: Any) -> LogRecord:
    values: dict[str, Any] = {
        "iteration": 1, "train_iters": 100, "consumed_samples": 8, "ms_per_iteration": 123.44, "learning_rate": 1e-3,
        "decoupled_learning_rate": None, "global_batch_size": 8, "loss": 10.812343219, "grad_norm": 1.2345678,
        "num_zeros": None, "params_norm": None, "skipped_iterations": 0, "nan_iterations": 2,
        "tflops_per_device": None, "tokens_per_second_per_device": None, "memory": {"memory allocated": 10.25},
    }  # fmt: skip
    return LogRecord(**values | changes)


def _fields(line: str) -> dict[str, float]:
    header = _ITERATION.search(line)
    assert header is not None and header.group(1, 2) == ("1", "100")
    parts = [part for part in header.group(3).split("|") if part.strip()]
    matches = [_FIELD.match(part) for part in parts]
    assert all(matches), parts
    return {match.group(1): float(match.group(2)) for match in matches if match}


def test_plain_line() -> None:
    line = format_log_line(_record(), now=datetime(2026, 1, 2, 3, 4, 5))
    assert line.startswith(" [2026-01-02 03:04:05] iteration        1/     100 | consumed samples:            8 |")
    assert "| lm loss: 1.08123432E+01 |" in line
    assert line.endswith("|")
    assert _fields(line) == {
        "consumed samples": 8, "elapsed time per iteration (ms)": 123.4, "learning rate": 1e-3, "global batch size": 8,
        "lm loss": 10.8123432, "loss scale": 1.0, "grad norm": 1.234568, "number of skipped iterations": 0,
        "number of nan iterations": 2, "memory allocated (MiB)": 10.2,
    }  # fmt: skip


def test_line_with_everything() -> None:
    record = _record(
        num_zeros=7.0, params_norm=3.5, tflops_per_device=525.26, tokens_per_second_per_device=10205.4,
        decoupled_learning_rate=5e-4, auxiliary_losses={"load_balancing_loss": 1.25, "z_loss": 0.5},
    )  # fmt: skip
    fields = _fields(format_log_line(record))
    assert fields["throughput per GPU (TFLOP/s/GPU)"] == 525.3
    assert fields["tokens per second per GPU (tokens/s/GPU)"] == 10205.4
    assert (fields["num zeros"], fields["params norm"], fields["decoupled learning rate"]) == (7.0, 3.5, 5e-4)
    assert (fields["load_balancing_loss"], fields["z_loss"]) == (1.25, 0.5)
    assert record.scalars()["num-zeros"] == 7.0 and record.scalars()["load_balancing_loss"] == 1.25
    assert record.time_scalars()["iteration-time"] == pytest.approx(0.12344)


def test_slow_devices_show_more_than_zero() -> None:
    fields = _fields(format_log_line(_record(tflops_per_device=0.0123, tokens_per_second_per_device=5.0)))
    assert fields["throughput per GPU (TFLOP/s/GPU)"] == 0.0123


def test_evaluation() -> None:
    bar, line, end = format_evaluation("iteration 10 on validation set", 2.0).splitlines()
    assert line == (
        " validation loss at iteration 10 on validation set | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 | "
    )
    assert bar == end and set(bar) == {"-"}
