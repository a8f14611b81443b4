"""Gathers what steps did on the device, and writes it at the log interval: console, TensorBoard, Weights & Biases."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron.core.optimizer import MegatronOptimizer
from megatron.training.batches import BatchConfig
from megatron.training.log_line import LogRecord, format_evaluation, format_log_line
from megatron.training.memory import memory_in_mib
from megatron.training.tensorboard_writer import TensorboardWriter, require_tensorboard
from megatron.training.train_step import StepRecord
from megatron.training.wandb_writer import WandbWriter, require_wandb


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What is logged, how often and where to."""

    log_interval: int = 100
    """Iterations between log lines."""

    log_throughput: bool = False
    log_params_norm: bool = False
    """It costs a pass over all weights at the log interval."""

    logging_level: int | None = None
    """Of Python's root logger; None leaves it."""

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
        # Here, so that a missing package is found before anything is allocated, and on all ranks.
        if self.tensorboard_dir:
            require_tensorboard()
        if self.wandb_project:
            require_wandb()


class ScalarWriter(Protocol):
    """Where scalars go."""

    def add_scalars(self, scalars: dict[str, float], iteration: int) -> None: ...

    def close(self) -> None: ...


def build_writers(config: LoggingConfig, settings: dict[str, Any]) -> list[ScalarWriter]:
    """The writers that were asked for; on ranks other than 0 none."""
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


class MetricLog:
    """Keeps the results of steps on the device and turns them into a log line every ``log_interval`` iterations.

    Args:
        flops_per_sample: model FLOPs; see ``flops.FLOP_CONVENTION``.
        tokens_per_sample: tokens of a sample.

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
    ) -> None:
        self.config, self.batch, self.device, self.train_iters = config, batch, device, train_iters
        self.flops_per_sample, self.tokens_per_sample, self.writers = flops_per_sample, tokens_per_sample, writers
        self._steps: list[StepRecord] = []
        self._elapsed = 0.0
        self._started: float | None = None

    def start_clock(self) -> None:
        """Time counts for the iterations from here on."""
        self._started = time.perf_counter()

    def stop_clock(self) -> None:
        """What follows (an evaluation, a save) is not time of iterations; waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self._started is not None:
            self._elapsed += time.perf_counter() - self._started
        self._started = None

    def add_step(self, step: StepRecord) -> None:
        """The step counts for the next line; does not block the host."""
        self._steps.append(step)

    def write(self, *, iteration: int, consumed_samples: int, optimizer: MegatronOptimizer) -> None:
        """One log line for the steps since the last one; blocks until the device has done them.

        Ranks: all; rank 0 writes.
        """
        losses, nan_iterations = self._mean_losses()
        self.stop_clock()
        params_norm = optimizer.params_norm().item() if self.config.log_params_norm else None
        last, seconds = self._steps[-1], self._elapsed / len(self._steps)
        rates = _learning_rates(optimizer)
        record = LogRecord(
            iteration=iteration,
            train_iters=self.train_iters,
            consumed_samples=consumed_samples,
            ms_per_iteration=1000.0 * seconds,
            learning_rate=rates[False],
            decoupled_learning_rate=rates.get(True),
            global_batch_size=self.batch.global_batch_size,
            loss=losses,
            grad_norm=last.grad_norm.item(),
            num_zeros=None if last.num_zeros_in_grad is None else last.num_zeros_in_grad.item(),
            params_norm=params_norm,
            skipped_iterations=sum(not step.update_successful for step in self._steps),
            nan_iterations=nan_iterations,
            tflops_per_device=self._per_device(self.flops_per_sample, seconds, 1e12),
            tokens_per_second_per_device=self._per_device(self.tokens_per_sample, seconds, 1.0),
            memory=memory_in_mib(self.device),
        )
        self._write_record(record)
        self._steps, self._elapsed = [], 0.0
        self.start_clock()

    def write_evaluation(self, where: str, name: str, loss: float, iteration: int) -> None:
        """The lines and scalars of an evaluation. Ranks: any; rank 0 writes."""
        if dist.get_rank() == 0:
            print(format_evaluation(where, loss), flush=True)
        scalars = {f"lm loss {name}": loss}
        if self.config.validation_ppl_to_tensorboard:
            scalars[f"lm loss {name} ppl"] = float(torch.tensor(min(20.0, loss)).exp())
        for writer in self.writers:
            writer.add_scalars(scalars, iteration)

    def close(self) -> None:
        """All that was logged is on disk."""
        for writer in self.writers:
            writer.close()

    def _mean_losses(self) -> tuple[float, int]:
        """The mean loss of the iterations whose loss is finite (or the last, where none is), and how many are not."""
        sums = torch.stack([step.loss_and_tokens for step in self._steps])
        dist.all_reduce(sums)
        losses = [loss / max(tokens, 1.0) for loss, tokens in sums.tolist()]
        finite = [loss for loss in losses if abs(loss) < float("inf")]
        mean = sum(finite) / len(finite) if finite else losses[-1]
        return mean, len(losses) - len(finite)

    def _per_device(self, per_sample: int, seconds: float, unit: float) -> float | None:
        if not self.config.log_throughput:
            return None
        return per_sample * self.batch.global_batch_size / self.batch.data_parallel_size / seconds / unit

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


def _learning_rates(optimizer: MegatronOptimizer) -> dict[bool, float]:
    """The learning rate by whether it is the decoupled one."""
    rates: dict[bool, Any] = {bool(group["is_decoupled_lr"]): group["lr"] for group in optimizer.param_groups}
    return {kind: float(rate) for kind, rate in rates.items()} | ({} if False in rates else {False: float(rates[True])})
