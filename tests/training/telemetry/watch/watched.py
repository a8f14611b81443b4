"""Log lines and boards of runs that are no runs, for the tests of what watches them."""

from __future__ import annotations

import math
from pathlib import Path

from megatron.training.telemetry.log_line import LogRecord
from megatron.training.telemetry.watch.board import Board
from megatron.training.telemetry.watch.run_state import About

LAUNCH_LINE = "pretrain_gpt.py --wandb-exp-name '</script><script>document.title=1</script>' --bf16 & \u2028"


def record(iteration: int, **values: float | None) -> LogRecord:
    """A log line of an iteration of 8 samples and 2 s."""
    given = {
        "skipped_iterations": 0,
        "nan_iterations": 0,
        "ms_per_iteration": 2000.0,
        "loss": 3.0,
        "grad_norm": 1.0,
        "learning_rate": 0.1,
        "is_due": True,
        **values,
    }
    return LogRecord(
        iteration=iteration,
        train_iters=100,
        consumed_samples=8 * iteration,
        decoupled_learning_rate=None,
        global_batch_size=8,
        num_zeros=None,
        params_norm=None,
        tflops_per_device=None,
        tokens_per_second_per_device=None,
        memory={},
        **given,  # type: ignore[arg-type]
    )


def values_of(iteration: int, **values: float) -> dict[str, float | None]:
    """The values of the log line of an iteration."""
    loss = 2.0 + 8.0 * math.exp(-iteration / 100)
    return {
        "loss": loss,
        "loss low": loss,
        "loss high": 50.0 if iteration == 1234 else loss,
        "grad norm": None if iteration % 500 == 0 else 1.0,
        "learning rate": 1e-3,
        "ms per iteration": 100.0,
        "skipped iterations": float(iteration % 500 == 0),
        "nan iterations": 0.0,
        "tokens/s/GPU": 1000.0,
        "TFLOP/s/GPU": 500.0,
        "max memory allocated (MiB)": 1024.0,
        **values,
    }


def board(folder: Path, *, start: int = 0, stop: int = 3000) -> Board:
    """A run that has begun after iteration ``start`` and has written a line for each iteration up to ``stop``."""
    texts = (("Launch line", LAUNCH_LINE), ("Versions", "torch 0, Python 0"))
    made = Board(
        About(run='a "run"\\', texts=texts, peak_tflops=989.0),
        page=folder / "status.html",
        prometheus=folder / "run.prom",
    )
    made.begin(start, f"training goes on after iteration {start}" if start else "training starts")
    for iteration in range(start + 1, stop + 1):
        made.add_line(iteration, 1.7e9 + iteration, values_of(iteration), is_due=True)
    made.history.add_evaluation(stop, 1.7e9 + stop, "validation", 2.5)
    made.history.add_event("save", stop, 1.7e9 + stop, f"saved iteration {stop} in 3 s")
    made.set_progress(iteration=stop, last_iteration=2 * stop, fraction_done=0.5, progress="50 % done, 5 min 00 s left")
    made.state.links = [("Overlap report of iteration 7", "overlap/overlap.html")]
    return made
