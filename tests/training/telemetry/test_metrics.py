"""Means and rates of the log, and writers that are missing."""

from __future__ import annotations

import contextlib
import io
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.training.data.batches import BatchConfig
from megatron.training.loop.train_step import StepRecord
from megatron.training.telemetry.metrics import LoggingConfig, MetricLog, build_writers
from tests.support.launch import run_ranks

_CPU = torch.device("cpu")


class _Kept:
    def __init__(self) -> None:
        self.points: dict[str, dict[int, float]] = defaultdict(dict)
        self.samples: dict[str, dict[int, float]] = defaultdict(dict)

    def add_scalars(self, scalars: dict[str, float], iteration: int, *, samples: int | None = None) -> None:
        for name, value in scalars.items():
            self.points[name][iteration] = value
            if samples is not None:
                self.samples[name][samples] = value

    def flush(self) -> None: ...

    def close(self) -> None: ...


def _optimizer() -> MegatronOptimizer:
    return get_megatron_optimizer(OptimizerConfig(lr=0.5), [torch.nn.Linear(2, 2)])


def _log(writer: _Kept, config: LoggingConfig, **others: Any) -> MetricLog:
    return MetricLog(
        config,
        BatchConfig(micro_batch_size=1, global_batch_size=2, data_parallel_size=2),
        device=_CPU,
        train_iters=9,
        flops_per_sample=10**12,
        tokens_per_sample=5,
        writers=[writer],
        **others,
    )


def _write_steps(log: MetricLog, steps: Sequence[StepRecord]) -> list[str]:
    """Add and write steps from iteration 1 on; return what is printed."""
    optimizer, text = _optimizer(), io.StringIO()
    log.start_clock()
    with contextlib.redirect_stdout(text):
        for iteration, step in enumerate(steps, start=1):
            log.add_step(step, iteration=iteration, consumed_samples=2 * iteration, optimizer=optimizer)
            log.write_if_due(optimizer)
    return text.getvalue().splitlines()


def _log_three_steps() -> tuple[list[str], _Kept]:
    """Rank r has a loss of (r + 1) per token on 1 token in step 1, and 3 on 3 tokens in step 2 (NaN in step 3)."""
    rank, writer = dist.get_rank(), _Kept()
    config = LoggingConfig(
        log_interval=3, log_throughput=True, timers_to_tensorboard=True, world_size_to_tensorboard=True
    )
    losses = [(rank + 1.0, 1.0), (9.0, 3.0 - 2 * rank), (float("nan"), 1.0)]
    steps = [
        StepRecord(torch.tensor(loss, dtype=torch.float64), torch.tensor(2.0 + index), None, True)
        for index, loss in enumerate(losses)
    ]
    return _write_steps(_log(writer, config), steps), writer


@pytest.fixture(scope="module")
def three_steps() -> tuple[list[str], _Kept]:
    first, second = run_ranks(2, _log_three_steps)
    assert second[0] == [], "rank 0 writes"
    lines: list[str] = first[0]
    return lines, first[1]


def test_the_loss_is_the_mean_over_the_tokens_of_each_global_batch(three_steps: tuple[list[str], _Kept]) -> None:
    """(1 + 2) / 2 and (9 + 9) / (3 + 1); the step that is not finite is counted, not averaged."""
    lines, writer = three_steps
    assert "| lm loss: 3.000000E+00 |" in lines[-1] and "number of nan iterations:   1 |" in lines[-1]
    losses = writer.points["lm loss"]
    assert (losses[1], losses[2]) == (1.5, 4.5) and math.isnan(losses[3])


def test_the_first_iteration_has_a_line_and_counts_in_the_next_one_too(three_steps: tuple[list[str], _Kept]) -> None:
    """As in Megatron-LM: it shows at once that training runs; its time is no point of the curve."""
    lines, writer = three_steps
    assert [line.split(" | ")[0].split("iteration")[1].split("/")[0].strip() for line in lines] == ["1", "3"]
    assert "| lm loss: 1.500000E+00 |" in lines[0]
    assert list(writer.points["iteration-time"]) == [3]
    assert list(writer.points["throughput"]) == [1, 3]


def test_curves_have_a_point_for_each_iteration_also_over_samples(three_steps: tuple[list[str], _Kept]) -> None:
    _, writer = three_steps
    assert writer.points["grad-norm"] == {1: 2.0, 2: 3.0, 3: 4.0}
    assert writer.samples["grad-norm"] == {2: 2.0, 4: 3.0, 6: 4.0}
    by_samples = {"learning-rate", "batch-size", "loss-scale", "world-size", "lm loss", "grad-norm"}
    assert set(writer.samples) == by_samples
    assert set(writer.points) - by_samples == {"iteration-time", "throughput", "tokens-per-second-per-device"}
    assert set(writer.points["world-size"].values()) == {2.0} and set(writer.points["loss-scale"].values()) == {1.0}


def _log_auxiliary_losses() -> tuple[list[str], _Kept]:
    """Each rank has a part of two losses in two steps: together 1 and 2 in the first, 3 and 6 in the second."""
    rank, writer = dist.get_rank(), _Kept()
    steps = []
    for total in (1.0, 3.0):
        parts = torch.tensor([total, 2 * total], dtype=torch.float64) * (0.25, 0.75)[rank]
        sums = torch.tensor([4.0, 2.0], dtype=torch.float64)
        steps.append(StepRecord(sums, torch.tensor(2.0), torch.tensor(5), True, parts))
    config = LoggingConfig(
        log_interval=2, tensorboard_log_interval=2, log_params_norm=True, loss_scale_to_tensorboard=False
    )
    return _write_steps(_log(writer, config, auxiliary_losses=("balance", "z")), steps), writer


def test_auxiliary_losses_are_sums_over_ranks_and_means_over_steps() -> None:
    """On the line; points are of the iteration alone."""
    (lines, writer), _ = run_ranks(2, _log_auxiliary_losses)
    assert "| lm loss: 2.000000E+00 | balance: 2.00 | z: 4.00 |" in lines[-1] and "| num zeros: 5.0 |" in lines[-1]
    assert writer.points["balance"] == {2: 3.0} and writer.points["z"] == {2: 6.0}, "not over samples, as there"
    assert writer.points["num-zeros"] == {2: 5.0} and writer.points["lm loss"] == {2: 2.0}
    assert set(writer.points["params-norm"]) == {2} and writer.points["params-norm"][2] > 0
    assert "loss-scale" not in writer.points and "balance" not in writer.samples


def _log_with_delay() -> list[dict[int, float]]:
    """Points that are there before iterations 2 and 3, from a device that is a step behind the host, and at the end."""
    writer = _Kept()
    log = _log(writer, LoggingConfig(log_interval=1))
    log._delays = True
    optimizer = _optimizer()
    log.start_clock()
    seen = []
    for iteration in (1, 2):
        loss = torch.tensor([float(iteration), 1.0], dtype=torch.float64)
        step = StepRecord(loss, torch.tensor(1.0), None, True)
        log.add_step(step, iteration=iteration, consumed_samples=iteration, optimizer=optimizer)
        seen.append(dict(writer.points["lm loss"]))
        log.write_if_due(optimizer)
        loss.fill_(100.0)  # what is logged was taken when the step ended
        assert set(writer.points["lm loss"]) == set(range(1, iteration))
    log.stop_clock("save")
    return [*seen, dict(writer.points["lm loss"])]


def test_a_delayed_line_is_written_after_the_next_step_or_when_the_clock_stops() -> None:
    assert run_ranks(1, _log_with_delay) == [[{}, {1: 1.0}, {1: 1.0, 2: 2.0}]]


def test_wandb_gets_scalars_and_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []
    wandb = ModuleType("wandb")
    wandb.__spec__ = SimpleNamespace()  # type: ignore[assignment]
    wandb.init = lambda **kwargs: SimpleNamespace(  # type: ignore[attr-defined]
        log=lambda scalars, step: calls.append(("log", (scalars, step))), finish=lambda: calls.append(("finish", None))
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    (writer,) = build_writers(LoggingConfig(wandb_project="p", wandb_exp_name="e"), {"hidden_size": 4})
    writer.add_scalars({"lm loss": 1.0}, 7, samples=14)
    writer.add_scalars({"throughput": 2.0}, 7)
    writer.flush()
    writer.close()
    points = [("log", ({"samples vs steps": 14, "lm loss": 1.0}, 7)), ("log", ({"throughput": 2.0}, 7))]
    assert calls == [*points, ("finish", None)]


@pytest.mark.parametrize(
    "settings",
    [{"log_interval": 0}, {"tensorboard_log_interval": 0}, {"log_memory_interval": 0}, {"wandb_project": "p"}],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"(at least 1|needs --wandb-exp-name)"):
        LoggingConfig(**settings)
