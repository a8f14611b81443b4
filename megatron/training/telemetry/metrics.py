"""Metrics of steps, collected on the device and written at the log interval to console, TensorBoard, Weights & Biases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron.core.delayed_read import DelayedRead
from megatron.core.optimizer import MegatronOptimizer
from megatron.training.data.batches import BatchConfig
from megatron.training.loop.train_step import StepRecord
from megatron.training.telemetry.log_line import LogRecord, format_evaluation, format_log_line
from megatron.training.telemetry.memory import memory_in_mib
from megatron.training.telemetry.step_clock import make_step_clock
from megatron.training.telemetry.tensorboard_writer import TensorboardWriter
from megatron.training.telemetry.wandb_writer import WandbWriter


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Settings of logging."""

    log_interval: int = 100
    """Iterations between log lines."""

    log_throughput: bool = False
    log_params_norm: bool = False
    """Log the norm of all weights, at the cost of a pass over them at the log interval."""

    logging_level: int | None = None
    """Level of Python's root logger; None: leave it."""

    tensorboard_dir: str | None = None
    tensorboard_queue_size: int = 1000
    timers_to_tensorboard: bool = False
    memory_to_tensorboard: bool = False
    validation_ppl_to_tensorboard: bool = False

    wandb_project: str = ""
    wandb_entity: str = ""
    wandb_exp_name: str = ""
    wandb_save_dir: str = ""

    def __post_init__(self) -> None:
        if self.log_interval < 1:
            raise ValueError(f"--log-interval must be at least 1, got {self.log_interval}")
        if self.wandb_project and not self.wandb_exp_name:
            raise ValueError("--wandb-project needs --wandb-exp-name, got none")


class ScalarWriter(Protocol):
    """A destination of scalars."""

    def add_scalars(self, scalars: dict[str, float], iteration: int) -> None: ...

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
class _PendingLine:
    """A log line whose values are being copied to the host."""

    values: DelayedRead
    """Gradient norm, the optional values, and for each step the sums of losses and tokens and the auxiliary losses."""
    optional: list[str]
    end: Any
    """Time at which its last step is done."""
    iteration: int
    consumed_samples: int
    num_steps: int
    skipped: int
    learning_rates: dict[bool, float]
    """Learning rates; the key says whether it is the decoupled one."""


class MetricLog:
    """The log of a run: it keeps results of steps on the device and writes a line every ``log_interval`` iterations.

    On CUDA a line is written one step later, when its values have arrived, so that even a line for every iteration does not
    make the host wait for the device. When the clock stops, a pending line is written at once.

    Args:
        flops_per_sample: model FLOPs; see ``flops.FLOP_CONVENTION``.
        tokens_per_sample: tokens of a sample.
        auxiliary_losses: [A] names of the steps' ``auxiliary_losses``.

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
    ) -> None:
        self.config, self.batch, self.device, self.train_iters = config, batch, device, train_iters
        self.flops_per_sample, self.tokens_per_sample, self.writers = flops_per_sample, tokens_per_sample, writers
        self.auxiliary_losses = auxiliary_losses
        self._steps: list[StepRecord] = []
        self._pending: _PendingLine | None = None
        self._delays = device.type == "cuda"
        self._clock = make_step_clock(device)
        self._elapsed = 0.0
        self._started: Any = None  # time from which on the clock counts; None while it is stopped

    def start_clock(self) -> None:
        """Start to count time for the iterations."""
        self._started = self._clock.now()

    def stop_clock(self) -> None:
        """Stop counting time, before an evaluation or a save; waits for the device."""
        self._write_pending()
        self._count_until(self._clock.now())
        self._started = None

    def _count_until(self, moment: Any) -> None:
        if self._started is not None:
            self._elapsed += self._clock.seconds(self._started, moment)
            self._started = moment

    def add_step(self, step: StepRecord) -> None:
        """Add a step to the next line; write the pending line first."""
        self._write_pending()
        self._steps.append(step)

    @torch.no_grad()
    def write(self, *, iteration: int, consumed_samples: int, optimizer: MegatronOptimizer) -> None:
        """Write one log line for the steps since the last one, on CUDA when its values have arrived.

        Ranks: all; rank 0 writes.
        """
        last = self._steps[-1]
        sums = torch.stack([_summands(step) for step in self._steps])
        # Ranks that share samples, and stages, add the same to both sums, so the mean is right.
        dist.all_reduce(sums)
        optional = {
            "num_zeros": last.num_zeros_in_grad,
            "params_norm": optimizer.params_norm() if self.config.log_params_norm else None,
        }
        scalars = [last.grad_norm, *(value for value in optional.values() if value is not None)]
        self._pending = _PendingLine(
            values=DelayedRead(torch.cat((torch.stack(scalars).double(), sums.flatten()))),
            optional=[name for name, value in optional.items() if value is not None],
            end=self._clock.now(),
            iteration=iteration,
            consumed_samples=consumed_samples,
            num_steps=len(self._steps),
            skipped=sum(not step.update_successful for step in self._steps),
            learning_rates=_learning_rates(optimizer),
        )
        self._steps = []
        if not self._delays:
            self._write_pending()

    def _write_pending(self) -> None:
        if self._pending is None:
            return
        line, self._pending = self._pending, None
        values = line.values.values()
        self._count_until(line.end)
        seconds, self._elapsed = self._elapsed / line.num_steps, 0.0
        num_scalars = 1 + len(line.optional)
        width = 2 + len(self.auxiliary_losses)
        losses, tokens, *auxiliary = (values[num_scalars + column :: width] for column in range(width))
        loss, nan_iterations = _mean_loss(losses, tokens)
        optional = dict(zip(line.optional, values[1:num_scalars], strict=True))
        self._write_record(
            LogRecord(
                iteration=line.iteration,
                train_iters=self.train_iters,
                consumed_samples=line.consumed_samples,
                ms_per_iteration=1000.0 * seconds,
                learning_rate=line.learning_rates[False],
                decoupled_learning_rate=line.learning_rates.get(True),
                global_batch_size=self.batch.global_batch_size,
                loss=loss,
                auxiliary_losses={
                    name: sum(of_steps) / len(of_steps)
                    for name, of_steps in zip(self.auxiliary_losses, auxiliary, strict=True)
                },
                grad_norm=values[0],
                num_zeros=optional.get("num_zeros"),
                params_norm=optional.get("params_norm"),
                skipped_iterations=line.skipped,
                nan_iterations=nan_iterations,
                tflops_per_device=self._per_device(self.flops_per_sample, seconds, 1e12),
                tokens_per_second_per_device=self._per_device(self.tokens_per_sample, seconds, 1.0),
                memory=memory_in_mib(self.device),
            )
        )

    def write_evaluation(self, where: str, name: str, loss: float, iteration: int) -> None:
        """Write the lines and scalars of an evaluation. Ranks: any; rank 0 writes."""
        if dist.get_rank() == 0:
            print(format_evaluation(where, loss), flush=True)
        scalars = {f"lm loss {name}": loss}
        if self.config.validation_ppl_to_tensorboard:
            scalars[f"lm loss {name} ppl"] = float(torch.tensor(min(20.0, loss)).exp())
        for writer in self.writers:
            writer.add_scalars(scalars, iteration)

    def close(self) -> None:
        """Flush and close all writers."""
        for writer in self.writers:
            writer.close()

    def _per_device(self, per_sample: int, seconds: float, unit: float) -> float | None:
        if not self.config.log_throughput:
            return None
        return per_sample * self.batch.global_batch_size / dist.get_world_size() / seconds / unit

    def _write_record(self, record: LogRecord) -> None:
        if dist.get_rank() != 0:
            return
        print(format_log_line(record), flush=True)
        scalars = record.scalars()
        if self.config.timers_to_tensorboard:
            scalars |= record.time_scalars()
        if self.config.memory_to_tensorboard:
            scalars |= {f"{kind} (MiB)": value for kind, value in record.memory.items()}
        for writer in self.writers:
            writer.add_scalars(scalars, record.iteration)


def _summands(step: StepRecord) -> torch.Tensor:
    """Concatenate a step's values that are summed over ranks: [2 + A]."""
    if step.auxiliary_losses is None:
        return step.loss_and_tokens
    return torch.cat((step.loss_and_tokens, step.auxiliary_losses))


def _mean_loss(losses: Sequence[float], tokens: Sequence[float]) -> tuple[float, int]:
    """Return the mean loss of the iterations with a finite one (if none, the last loss), and the number of the others."""
    means = [loss / max(count, 1.0) for loss, count in zip(losses, tokens, strict=True)]
    finite = [mean for mean in means if abs(mean) < float("inf")]
    return (sum(finite) / len(finite) if finite else means[-1]), len(means) - len(finite)


def _learning_rates(optimizer: MegatronOptimizer) -> dict[bool, float]:
    """Return the learning rates; the key says whether it is the decoupled one."""
    rates: dict[bool, Any] = {bool(group["is_decoupled_lr"]): group["lr"] for group in optimizer.param_groups}
    return {kind: float(rate) for kind, rate in rates.items()} | ({} if False in rates else {False: float(rates[True])})
