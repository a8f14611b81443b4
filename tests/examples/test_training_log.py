"""The parser reads what the training loop writes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from examples.loss_curve import main
from examples.training_log import IterationLine, ValidationLine, parse_line, read_losses
from examples.training_run import describe
from megatron.training.telemetry.log_line import LogRecord, format_evaluation, format_log_line

RECORD = LogRecord(
    iteration=30,
    train_iters=120,
    consumed_samples=480,
    ms_per_iteration=2000.0,
    learning_rate=1e-3,
    decoupled_learning_rate=None,
    global_batch_size=16,
    loss=2.5,
    grad_norm=1.0,
    num_zeros=None,
    params_norm=None,
    skipped_iterations=0,
    nan_iterations=0,
    tflops_per_device=0.1,
    tokens_per_second_per_device=1234.5,
    memory={"memory resident": 1.0},
)


@pytest.mark.parametrize("throughput", [True, False])
def test_a_log_line_is_read_as_it_was_written(throughput: bool) -> None:
    record = RECORD
    if not throughput:
        record = dataclasses.replace(RECORD, tflops_per_device=None, tokens_per_second_per_device=None)
    line = parse_line(format_log_line(record))
    assert isinstance(line, IterationLine)
    assert (line.iteration, line.last_iteration, line.loss, line.ms_per_iteration) == (30, 120, 2.5, 2000.0)
    assert line.tokens_per_second_per_device == (1234.5 if throughput else None)
    assert line.seconds_left == 180.0


def test_evaluations_on_test_data_are_not_validation() -> None:
    def parsed(where: str) -> list[object]:
        return [line for text in format_evaluation(where, 1.5).splitlines() if (line := parse_line(text))]

    assert parsed("iteration 10") == [ValidationLine(iteration=10, loss=1.5)]
    assert parsed("iteration 10 on validation set") == [ValidationLine(iteration=10, loss=1.5)]
    assert parsed("iteration 10 on test set") == []


def test_iterations_that_were_trained_twice_count_as_they_were_the_second_time() -> None:
    def lines(iteration: int, loss: float) -> str:
        return format_log_line(dataclasses.replace(RECORD, iteration=iteration, loss=loss))

    curves = read_losses([lines(10, 3.0), lines(20, 2.0), "killed", lines(20, 2.25), lines(30, 1.0)])
    assert curves.train == {10: 3.0, 20: 2.25, 30: 1.0}


def test_someone_who_watches_sees_how_far_it_is() -> None:
    shown = describe(format_log_line(RECORD))
    assert shown is not None and "iteration 30/120" in shown and "loss 2.500" in shown and "3:00 left" in shown
    assert shown.count("=") == 6
    assert describe("effective configuration:") is None
    assert (
        describe(
            "  [2026-01-02 03:04:05.0] successfully saved checkpoint from iteration      10 to folder [ t 1/1, p 1/1 ]"
        )
        is not None
    )


def test_the_curves_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, picture = tmp_path / "log.txt", tmp_path / "loss.png"
    log.write_text("nothing\n")
    assert main([str(log), "--output", str(picture)]) == 1
    assert "must hold log lines" in capsys.readouterr().err and not picture.exists()
    log.write_text(f"{format_log_line(RECORD)}\n{format_evaluation('iteration 30', 2.4)}\n")
    assert main([str(log), "--output", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
