"""Means and rates of the log, and writers that are missing."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.training.data.batches import BatchConfig
from megatron.training.loop.train_step import StepRecord
from megatron.training.telemetry.metrics import LoggingConfig, MetricLog, build_writers
from tests.support.launch import run_ranks

_CPU = torch.device("cpu")


class _Kept:
    def __init__(self) -> None:
        self.scalars: dict[str, float] = {}

    def add_scalars(self, scalars: dict[str, float], iteration: int) -> None:
        self.scalars |= scalars | {"iteration": iteration}

    def close(self) -> None: ...


def _log_two_steps() -> dict[str, float]:
    """Rank r has a loss of (r + 1) per token on 1 token in step 1, and 3 on 3 tokens in step 2 (NaN in step 3)."""
    import torch.distributed as dist

    rank, writer = dist.get_rank(), _Kept()
    log = MetricLog(
        LoggingConfig(log_throughput=True),
        BatchConfig(micro_batch_size=1, global_batch_size=2, data_parallel_size=2),
        device=_CPU,
        train_iters=9,
        flops_per_sample=10**12,
        tokens_per_sample=5,
        writers=[writer],
    )
    losses = [(rank + 1.0, 1.0), (9.0, 3.0 - 2 * rank), (float("nan"), 1.0)]
    log.start_clock()
    for loss, tokens in losses:
        sums = torch.tensor([loss, tokens], dtype=torch.float64)
        log.add_step(StepRecord(sums, torch.tensor(2.0), None, True))
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.5), [torch.nn.Linear(2, 2)])
    log.write(iteration=3, consumed_samples=6, optimizer=optimizer)
    return writer.scalars


def test_the_loss_is_the_mean_over_the_tokens_of_each_global_batch() -> None:
    zero, one = run_ranks(2, _log_two_steps)
    assert one == {}
    # (1 + 2) / 2 and (9 + 9) / (3 + 1); the step that is not finite is counted, not averaged
    assert zero["lm loss"] == pytest.approx((1.5 + 4.5) / 2)
    assert zero["learning-rate"] == 0.5
    assert zero["grad-norm"] == 2.0


def _log_auxiliary_losses() -> dict[str, float]:
    """Each rank has a part of two losses in two steps: together 1 and 2 in the first, 3 and 6 in the second."""
    import torch.distributed as dist

    rank, writer = dist.get_rank(), _Kept()
    log = MetricLog(
        LoggingConfig(),
        BatchConfig(micro_batch_size=1, global_batch_size=2, data_parallel_size=2),
        device=_CPU,
        train_iters=9,
        flops_per_sample=1,
        tokens_per_sample=5,
        writers=[writer],
        auxiliary_losses=("balance", "z"),
    )
    log.start_clock()
    for total in (1.0, 3.0):
        parts = torch.tensor([total, 2 * total], dtype=torch.float64) * (0.25, 0.75)[rank]
        sums = torch.tensor([4.0, 2.0], dtype=torch.float64)
        log.add_step(StepRecord(sums, torch.tensor(2.0), torch.tensor(5), True, parts))
    log.write(
        iteration=2,
        consumed_samples=4,
        optimizer=get_megatron_optimizer(OptimizerConfig(lr=0.5), [torch.nn.Linear(2, 2)]),
    )
    return writer.scalars


def test_auxiliary_losses_are_sums_over_ranks_and_means_over_steps() -> None:
    scalars, _ = run_ranks(2, _log_auxiliary_losses)
    assert (scalars["balance"], scalars["z"], scalars["lm loss"], scalars["num-zeros"]) == (2.0, 4.0, 2.0, 5.0)


def _log_with_delay() -> list[tuple[int, float]]:
    """Lines of iterations 1 and 2, as they would come from a device that is a step behind the host."""
    writer = _Kept()
    log = MetricLog(
        LoggingConfig(log_interval=1),
        BatchConfig(micro_batch_size=1, global_batch_size=1, data_parallel_size=1),
        device=_CPU,
        train_iters=2,
        flops_per_sample=1,
        tokens_per_sample=1,
        writers=[writer],
    )
    log._delays = True
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.5), [torch.nn.Linear(2, 2)])
    log.start_clock()
    seen = []
    for iteration in (1, 2):
        loss = torch.tensor([float(iteration), 1.0], dtype=torch.float64)
        log.add_step(StepRecord(loss, torch.tensor(1.0), None, True))
        seen.append((int(writer.scalars.get("iteration", 0)), writer.scalars.get("lm loss", 0.0)))
        log.write(iteration=iteration, consumed_samples=iteration, optimizer=optimizer)
        loss.fill_(100.0)  # what is logged was taken when the step ended
        assert writer.scalars.get("iteration", 0) == iteration - 1
    log.stop_clock()
    return [*seen, (int(writer.scalars["iteration"]), writer.scalars["lm loss"])]


def test_a_delayed_line_is_written_after_the_next_step_or_when_the_clock_stops() -> None:
    assert run_ranks(1, _log_with_delay) == [[(0, 0.0), (1, 1.0), (2, 2.0)]]


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
    writer.add_scalars({"lm loss": 1.0}, 7)
    writer.close()
    assert calls == [("log", ({"lm loss": 1.0}, 7)), ("finish", None)]


@pytest.mark.parametrize("settings", [{"log_interval": 0}, {"wandb_project": "p"}])
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"(at least 1|needs --wandb-exp-name)"):
        LoggingConfig(**settings)
