"""Log lines have the format of Megatron-LM's logs."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

import pytest

from megatron.training.telemetry.log_line import LogRecord, format_evaluation, format_log_line
from megatron.training.telemetry.memory import memory_line

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


def test_plain_line_is_megatron_lms_to_the_digit_and_ours_comes_after() -> None:
    line = format_log_line(_record(), now=datetime(2026, 1, 2, 3, 4, 5, 678))
    upstream, own = line.split(" | exact loss: ")
    assert upstream == (
        " [2026-01-02 03:04:05.000678] iteration        1/     100 | consumed samples:            8 | "
        "elapsed time per iteration (ms): 123.4 | learning rate: 1.000000E-03 | global batch size:     8 | "
        "lm loss: 1.081234E+01 | loss scale: 1.0 | grad norm: 1.235 | number of skipped iterations:   0 | "
        "number of nan iterations:   2"
    )
    assert own == "1.081234322E+01 | exact norm: 1.234567800E+00 | memory allocated (MiB): 10.2 |"
    assert _fields(line)["memory allocated (MiB)"] == 10.2


def test_line_with_everything() -> None:
    record = _record(
        num_zeros=7.0, params_norm=3.5, tflops_per_device=525.26, tokens_per_second_per_device=10205.4,
        decoupled_learning_rate=5e-4, auxiliary_losses={"load_balancing_loss": 1.25, "z_loss": 0.5},
    )  # fmt: skip
    line = format_log_line(record)
    assert list(_fields(line)) == [
        "consumed samples", "elapsed time per iteration (ms)", "throughput per GPU (TFLOP/s/GPU)", "learning rate",
        "global batch size", "lm loss", "load_balancing_loss", "z_loss", "loss scale", "grad norm", "num zeros",
        "params norm", "number of skipped iterations", "number of nan iterations",
        "decoupled learning rate", "tokens per second per GPU (tokens/s/GPU)", "exact loss", "exact norm",
        "exact load_balancing_loss", "exact z_loss", "memory allocated (MiB)",
    ]  # fmt: skip
    for part in (
        "throughput per GPU (TFLOP/s/GPU): 525.3 |",
        "z_loss: 0.50 |",
        "num zeros: 7.0 |",
        "params norm: 3.500 |",
    ):
        assert f"| {part}" in line
    assert record.time_scalars()["iteration-time"] == pytest.approx(0.12344)


# How public tools read Megatron-LM's logs: sweep scripts, dashboards and CI pipelines search a line for these.
_PUBLIC_PATTERNS = {
    r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+)\]": "2026-01-02 03:04:05.000678",
    r"iteration\s+(\d+)/\s*\d+": "1",
    r"consumed samples:\s+(\d+)": "8",
    r"elapsed time per iteration \(ms\): ([\d.]+)": "123.4",
    r"throughput per GPU \(TFLOP/s/GPU\): ([\d.]+)": "525.3",
    r"throughput.*?:\s*([\d.]+)": "525.3",
    r"learning rate: ([\d.E+-]+)": "1.000000E-03",
    r"global batch size:\s+(\d+)": "8",
    r"lm loss: ([\d.E+-]+)": "1.081234E+01",
    r"lm loss:\s*([0-9.]+E[+-][0-9]+) \| loss scale": "1.081234E+01",
    r"loss scale: ([\d.]+)": "1.0",
    r"grad norm: ([\d.]+)": "1.235",
    r"num zeros: ([\d.]+)": "7.0",
    r"params norm: ([\d.]+)": "3.500",
    r"number of skipped iterations:\s+(\d+)": "0",
    r"number of nan iterations:\s+(\d+)": "2",
}


@pytest.mark.parametrize("pattern", _PUBLIC_PATTERNS)
def test_patterns_of_public_log_parsers_find_their_field(pattern: str) -> None:
    """The first match is Megatron-LM's field: what is ours has other names and comes later."""
    record = _record(num_zeros=7.0, params_norm=3.5, tflops_per_device=525.26, tokens_per_second_per_device=10205.4)
    found = re.search(pattern, format_log_line(record, now=datetime(2026, 1, 2, 3, 4, 5, 678)))
    assert found is not None and found[1] == _PUBLIC_PATTERNS[pattern]


def test_memory_line_of_the_first_iterations() -> None:
    mebibytes = {
        "memory allocated": 1.0,
        "memory reserved": 3.125,
        "max memory allocated": 2.0,
        "max memory reserved": 4.0,
    }
    assert memory_line(1, mebibytes) == (
        "[Rank 0] (after 1 iterations) memory (MB) | allocated: 1.00 | max allocated: 2.00 | reserved: 3.12 | "
        "max reserved: 4.00"
    )


def test_evaluation() -> None:
    bar, line, end = format_evaluation("iteration 10 on validation set", 2.0).splitlines()
    assert line == (
        " validation loss at iteration 10 on validation set | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 | "
    )
    assert bar == end == "-" * (len(line) + 1)
    found = re.search(
        r"validation loss at iteration (\d+).*lm loss value: ([\d.E+-]+) \| lm loss PPL: ([\d.E+-]+)", line
    )
    assert found is not None and [float(value) for value in found.groups()] == [10.0, 2.0, 7.389056]
