"""Metrics of steps, collected on the device and written at the log interval to console, TensorBoard, Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron.core.delayed_read import DelayedRead
from megatron.core.optimizer import MegatronOptimizer
from megatron.training.data.batches import BatchConfig
from megatron.training.loop.train_step import StepRecord
from megatron.training.telemetry.log_line import LogRecord, format_evaluation, format_log_line
from megatron.training.telemetry.memory import memory_in_mib, memory_line, memory_scalars
from megatron.training.telemetry.step_clock import make_step_clock
from megatron.training.telemetry.step_timers import Spans, StepTimers, format_timers, of_all_ranks
from megatron.training.telemetry.tensorboard_writer import TensorboardWriter
from megatron.training.telemetry.wandb_writer import WandbWriter
from megatron.training.telemetry.watch.run_watch import RunWatch

_NUM_MEMORY_LINES = 2
"""Log lines with a line about memory after them: after the first iteration the optimizer has no state yet."""


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Settings of logging."""

    log_interval: int = 100
    """Iterations between log lines."""

    log_throughput: bool = False
    log_params_norm: bool = False
    """Log the norm of all weights, at the cost of a pass over them at the log interval."""

    log_progress: bool = False
    """Write when jobs started and what they saved to ``progress.txt``, in the folder of ``--save``."""

    timing_log_level: int = 0
    """Parts of steps to time: none (0), forward with backward and the optimizer (1), and those of microbatches (2)."""

    timing_log_option: str = "minmax"
    """What a line of times shows of the ranks: "max", "minmax" or "all"."""

    log_memory_interval: int | None = None
    """Iterations between lines about memory, beside those of the first log lines; they follow log lines. CUDA alone."""

    logging_level: int | None = None
    """Level of Python's root logger; None: leave it."""

    tensorboard_dir: str | None = None
    tensorboard_queue_size: int = 1000
    tensorboard_log_interval: int = 1
    """Iterations between points of losses and norms; they are written with the log line."""

    timers_to_tensorboard: bool = False
    memory_to_tensorboard: bool = False
    validation_ppl_to_tensorboard: bool = False
    loss_scale_to_tensorboard: bool = True
    world_size_to_tensorboard: bool = False

    wandb_project: str = ""
    wandb_entity: str = ""
    wandb_exp_name: str = ""
    wandb_save_dir: str = ""

    def __post_init__(self) -> None:
        if self.log_interval < 1:
            raise ValueError(f"--log-interval must be at least 1, got {self.log_interval}")
        for name in ("tensorboard_log_interval", "log_memory_interval"):
            interval = getattr(self, name)
            if interval is not None and interval < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {interval}")
        if self.wandb_project and not self.wandb_exp_name:
            raise ValueError("--wandb-project needs --wandb-exp-name, got none")


class ScalarWriter(Protocol):
    """A destination of scalars."""

    def add_scalars(self, scalars: dict[str, float], iteration: int, *, samples: int | None = None) -> None:
        """Add points at ``iteration``; with ``samples``, those consumed by then, curves over samples too."""

    def flush(self) -> None:
        """Write what has been added, so that it is there even if the process is killed."""

    def close(self) -> None: ...


def build_writers(config: LoggingConfig, settings: dict[str, Any]) -> list[ScalarWriter]:
    """Build the configured writers on rank 0; none on other ranks."""
    writers: list[ScalarWriter] = []
    if dist.get_rank() != 0:
        return writers
    if config.tensorboard_dir:
        writers.append(TensorboardWriter(config.tensorboard_dir, queue_size=config.tensorboard_queue_size))
    if config.wandb_project:
        writers.append(
            WandbWriter(
                project=config.wandb_project,
                entity=config.wandb_entity,
                name=config.wandb_exp_name,
                folder=config.wandb_save_dir,
                settings=settings,
            )
        )
    return writers


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A step since the last log line, and what the writers get of it; other than ``record`` it is known on the host."""

    record: StepRecord
    iteration: int
    consumed_samples: int
    num_samples: int
    """The global batch size."""
    learning_rates: dict[bool, float] | None
    """None: the writers get nothing of this step."""
    memory: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class _PendingLine:
    """A log line whose values are being copied to the host."""

    values: DelayedRead
    """Norms of all steps, zeros of all steps if counted, the loss scales after all steps if there is one, the weights' norm if
    asked for, sums of all steps."""
    steps: list[_Step]
    num_written: int
    """Steps at the front that the writers have already."""
    counts_zeros: bool
    has_scale: bool
    has_params_norm: bool
    end: Any
    """Time at which its last step is done."""
    learning_rates: dict[bool, float]
    """Learning rates; the key says whether it is the decoupled one."""
    spans: Spans
    is_due: bool
    """False: it is the line of the first iteration, which the next line counts again."""


class MetricLog:
    """The log of a run: it keeps results of steps on the device and writes a line every ``log_interval`` iterations.

    On CUDA a line is written one step later, when its values have arrived, so that even a line for every iteration does not
    make the host wait for the device. When the clock stops, a pending line is written at once.

    Args:
        flops_per_sample: model FLOPs; see ``flops.FLOP_CONVENTION``.
        tokens_per_sample: tokens of a sample.
        auxiliary_losses: [A] names of the steps' ``auxiliary_losses``.
        watch: is told of lines, pauses and evaluations; rank 0's.

    Ranks: all make the same calls.
    """

    def __init__(
        self,
        config: LoggingConfig,
        batch: BatchConfig,
        *,
        device: torch.device,
        train_iters: int,
        flops_per_sample: int,
        tokens_per_sample: int,
        writers: Sequence[ScalarWriter],
        auxiliary_losses: Sequence[str] = (),
        watch: RunWatch | None = None,
    ) -> None:
        self.config, self.batch, self.device, self.train_iters = config, batch, device, train_iters
        self.flops_per_sample, self.tokens_per_sample, self.writers = flops_per_sample, tokens_per_sample, writers
        self.auxiliary_losses, self.watch = auxiliary_losses, watch
        self._steps: list[_Step] = []
        self._num_written = self._num_lines = 0  # of these steps by the writers, and lines of this run
        self._pending: _PendingLine | None = None
        self._delays = device.type == "cuda"
        self._clock = make_step_clock(device)
        self.timers = StepTimers(config.timing_log_level, self._clock) if config.timing_log_level else None
        self._elapsed = 0.0
        self._started: Any = None  # time from which on the clock counts; None while it is stopped

    def start_clock(self) -> None:
        """Start to count time for the iterations."""
        if self.watch is not None:
            self.watch.resume()
        self._started = self._clock.now()

    def stop_clock(self, why: str) -> None:
        """Stop counting time, before an evaluation or a save, which ``why`` names; waits for the device."""
        self._write_pending()
        self._count_until(self._clock.now())
        self._started = None
        if self.watch is not None:
            self.watch.pause(why)

    def _count_until(self, moment: Any) -> None:
        if self._started is not None:
            self._elapsed += self._clock.seconds(self._started, moment)
            self._started = moment

    def add_step(
        self, step: StepRecord, *, iteration: int, consumed_samples: int, optimizer: MegatronOptimizer
    ) -> None:
        """Add a step to the next line; write the pending line first."""
        self._write_pending()
        is_point = bool(self.writers) and iteration % self.config.tensorboard_log_interval == 0
        self._steps.append(
            _Step(
                record=step,
                iteration=iteration,
                consumed_samples=consumed_samples,
                num_samples=self.batch.global_batch_size,
                learning_rates=_learning_rates(optimizer) if is_point else None,
                memory=memory_scalars(self.device) if is_point and self.config.memory_to_tensorboard else {},
            )
        )

    @torch.no_grad()
    def write_if_due(self, optimizer: MegatronOptimizer) -> None:
        """Write a log line at the log interval and after the first step of the run; on CUDA when its values have arrived.

        Ranks: all; rank 0 writes.
        """
        last = self._steps[-1]
        is_due = last.iteration % self.config.log_interval == 0
        if not is_due and self._num_lines > 0:
            return
        self._num_lines += 1
        records = [step.record for step in self._steps]
        sums = torch.stack([_summands(record) for record in records])
        # Ranks that share samples, and stages, add the same to both sums, so the mean is right.
        dist.all_reduce(sums)
        scalars = [record.grad_norm for record in records]
        zeros = [record.num_zeros_in_grad for record in records if record.num_zeros_in_grad is not None]
        scales = [record.loss_scale.view(()) for record in records if record.loss_scale is not None]
        params_norm = [optimizer.params_norm()] if self.config.log_params_norm else []
        on_device = torch.stack([value.double() for value in (*scalars, *zeros, *scales, *params_norm)])
        self._pending = _PendingLine(
            values=DelayedRead(torch.cat((on_device, sums.flatten()))),
            steps=self._steps,
            num_written=self._num_written,
            counts_zeros=bool(zeros),
            has_scale=bool(scales),
            has_params_norm=bool(params_norm),
            end=self._clock.now(),
            learning_rates=_learning_rates(optimizer),
            spans=self.timers.spans(resets=is_due) if self.timers is not None else {},
            is_due=is_due,
        )
        self._num_written = 0 if is_due else len(self._steps)
        self._steps = [] if is_due else list(self._steps)
        if not self._delays:
            self._write_pending()

    def _write_pending(self) -> None:
        if self._pending is None:
            return
        line, self._pending = self._pending, None
        values, count = line.values.values(), len(line.steps)
        self._count_until(line.end)
        seconds = self._elapsed / count
        if line.is_due:
            self._elapsed = 0.0
        norms, rest = values[:count], values[count:]
        zeros, rest = (rest[:count], rest[count:]) if line.counts_zeros else (None, rest)
        scales, rest = (rest[:count], rest[count:]) if line.has_scale else ([1.0] * count, rest)
        params_norm, rest = (rest[0], rest[1:]) if line.has_params_norm else (None, rest)
        width = 2 + len(self.auxiliary_losses)
        losses, tokens, *auxiliary = (rest[column::width] for column in range(width))
        means = [loss / max(number, 1.0) for loss, number in zip(losses, tokens, strict=True)]
        updated = [step.record.update_successful for step in line.steps]
        for index in range(line.num_written, count):
            self._add_points(
                line.steps[index],
                {
                    "lm loss": means[index],
                    "loss-scale": scales[index] if self.config.loss_scale_to_tensorboard else None,
                    "grad-norm": norms[index] if updated[index] else None,
                    "num-zeros": zeros[index] if zeros else None,
                    "params-norm": params_norm if index == count - 1 else None,
                },
                {name: of_steps[index] for name, of_steps in zip(self.auxiliary_losses, auxiliary, strict=True)},
            )
        loss, nan_iterations = _mean_loss(means, updated)
        last = line.steps[-1]
        samples = sum(step.num_samples for step in line.steps) / count
        self._write_record(
            LogRecord(
                iteration=last.iteration,
                train_iters=self.train_iters,
                consumed_samples=last.consumed_samples,
                ms_per_iteration=1000.0 * seconds,
                learning_rate=line.learning_rates[False],
                decoupled_learning_rate=line.learning_rates.get(True),
                global_batch_size=last.num_samples,
                loss=loss,
                auxiliary_losses={
                    name: sum(of_steps) / len(of_steps)
                    for name, of_steps in zip(self.auxiliary_losses, auxiliary, strict=True)
                },
                loss_scale=scales[-1],
                grad_norm=norms[-1] if updated[-1] else None,
                num_zeros=zeros[-1] if zeros else None,
                params_norm=params_norm,
                skipped_iterations=updated.count(False),
                nan_iterations=nan_iterations,
                tflops_per_device=self._per_device(self.flops_per_sample * samples, seconds, 1e12),
                tokens_per_second_per_device=self._per_device(self.tokens_per_sample * samples, seconds, 1.0),
                memory=memory_in_mib(self.device),
                is_due=line.is_due,
            )
        )
        if self.timers is not None:
            seconds_of_parts = self.timers.seconds(line.spans)
            means_of_parts = {name: total / count for name, total in seconds_of_parts.items()}
            self.write_times(means_of_parts, last.iteration if self.config.timers_to_tensorboard else None)

    def write_times(self, seconds: Mapping[str, float], iteration: int | None = None) -> None:
        """Write a line of times on all ranks, and with an iteration points of the longest ones. Ranks: all; blocks."""
        milliseconds = of_all_ranks(seconds, self.device)
        if dist.get_rank() != 0:
            return
        print(format_timers(milliseconds, self.config.timing_log_option), flush=True)
        if iteration is not None:
            for writer in self.writers:
                longest = {f"{name}-time": max(of_ranks) / 1000.0 for name, of_ranks in milliseconds.items()}
                writer.add_scalars(longest, iteration)
                writer.flush()

    def _add_points(self, step: _Step, values: dict[str, float | None], auxiliary_losses: dict[str, float]) -> None:
        """Give the writers the values of one step under Megatron-LM's names."""
        if step.learning_rates is None:
            return
        curves = {
            "learning-rate": step.learning_rates[False],
            "batch-size": float(step.num_samples),
            "world-size": float(dist.get_world_size()) if self.config.world_size_to_tensorboard else None,
            "decoupled-learning-rate": step.learning_rates.get(True),
            **values,
        }
        known = {name: value for name, value in curves.items() if value is not None}
        for writer in self.writers:
            writer.add_scalars(known, step.iteration, samples=step.consumed_samples)
            writer.add_scalars(auxiliary_losses | step.memory, step.iteration)

    def write_evaluation(
        self, where: str, name: str, loss: float, *, iteration: int, consumed_samples: int, suffix: str = ""
    ) -> None:
        """Write the lines and scalars of an evaluation; ``suffix``: of one of several sets. Ranks: any; rank 0 writes."""
        if dist.get_rank() == 0:
            print(format_evaluation(where, loss, suffix=suffix), flush=True)
        scalars = {f"lm loss {name}{suffix}": loss}
        if self.config.validation_ppl_to_tensorboard:
            scalars[f"lm loss {name}{suffix} ppl"] = float(torch.tensor(min(20.0, loss)).exp())
        for writer in self.writers:
            writer.add_scalars(scalars, iteration, samples=consumed_samples)
            writer.flush()
        if self.watch is not None:
            self.watch.evaluated(f"{name}{suffix}", loss, iteration)

    def tell_overlap_report(self, page: Path, iteration: int) -> None:
        """Tell who watches that there is an overlap report."""
        if self.watch is not None:
            self.watch.add_overlap_report(page, iteration)

    def end(self, reason: str, *, iteration: int, consumed_samples: int) -> None:
        """Tell who watches why training ended, and after which iteration."""
        if self.watch is not None:
            self.watch.end(reason, iteration=iteration, consumed_samples=consumed_samples)

    def fail(self, error: BaseException) -> None:
        """Tell who watches which error ends the run."""
        if self.watch is not None:
            self.watch.fail(error)

    def close(self) -> None:
        """Flush and close all writers."""
        for writer in self.writers:
            writer.close()
        if self.watch is not None:
            self.watch.close()

    def _per_device(self, per_step: float, seconds: float, unit: float) -> float | None:
        if not self.config.log_throughput:
            return None
        return per_step / dist.get_world_size() / seconds / unit

    def _write_record(self, record: LogRecord) -> None:
        if dist.get_rank() != 0:
            return
        print(format_log_line(record), flush=True)
        if self.watch is not None:
            self.watch.add_line(record)
        interval = self.config.log_memory_interval
        is_due = self._num_lines <= _NUM_MEMORY_LINES or bool(interval and record.iteration % interval == 0)
        if is_due and self.device.type == "cuda":
            print(memory_line(record.iteration, record.memory), flush=True)
        scalars = record.time_scalars() if self.config.timers_to_tensorboard else {}
        if not record.is_due:
            scalars.pop("iteration-time", None)  # with what happens once; the next line counts it among others
        if self.config.memory_to_tensorboard:
            scalars |= {f"{kind} (MiB)": value for kind, value in record.memory.items()}
        for writer in self.writers:
            writer.add_scalars(scalars, record.iteration)
            writer.flush()


def _summands(step: StepRecord) -> torch.Tensor:
    """Concatenate a step's values that are summed over ranks: [2 + A]."""
    if step.auxiliary_losses is None:
        return step.loss_and_tokens
    return torch.cat((step.loss_and_tokens, step.auxiliary_losses))


def _mean_loss(means: Sequence[float], updated: Sequence[bool]) -> tuple[float, int]:
    """Return the mean loss of the iterations, and the number of those with a loss that is not finite.

    Those and skipped ones do not count in the mean; the last loss stands if no others are left.
    """
    finite = [abs(mean) < float("inf") for mean in means]
    counted = [mean for mean, *good in zip(means, finite, updated, strict=True) if all(good)]
    return (sum(counted) / len(counted) if counted else means[-1]), finite.count(False)


def _learning_rates(optimizer: MegatronOptimizer) -> dict[bool, float]:
    """Return the learning rates; the key says whether it is the decoupled one."""
    # Those of groups that scale with the width first: others replace them.
    groups = sorted(optimizer.param_groups, key=lambda group: group.get("lr_mult", 1.0) == 1.0)
    rates: dict[bool, Any] = {bool(group["is_decoupled_lr"]): group["lr"] for group in groups}
    return {kind: float(rate) for kind, rate in rates.items()} | ({} if False in rates else {False: float(rates[True])})
