"""Lines of the training log, in the format of Megatron-LM's logs: ``name: value`` between bars."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True, kw_only=True)
class LogRecord:
    """The values of a log line, over the iterations since the last one."""

    iteration: int
    train_iters: int
    consumed_samples: int
    ms_per_iteration: float
    learning_rate: float
    decoupled_learning_rate: float | None
    global_batch_size: int
    loss: float
    """Mean over the iterations that were not skipped of the mean over each global batch."""
    auxiliary_losses: dict[str, float] = field(default_factory=dict)
    """Losses of experts' routers by name, without coefficients: means over iterations, layers and microbatches."""
    loss_scale: float = 1.0
    """After the last iteration."""
    grad_norm: float | None
    """None: the last iteration was skipped."""
    num_zeros: float | None
    params_norm: float | None
    skipped_iterations: int
    nan_iterations: int
    tflops_per_device: float | None
    """None: neither throughput nor tokens are logged."""
    tokens_per_second_per_device: float | None
    memory: dict[str, float]
    """MiB by kind."""
    is_due: bool = True
    """False: the line of a run's first iteration, which the next line counts again."""

    def time_scalars(self) -> dict[str, float]:
        """Return seconds per iteration and throughput by their names in Megatron-LM's TensorBoard logs; tokens are ours."""
        values = {
            "iteration-time": self.ms_per_iteration / 1000.0,
            "throughput": self.tflops_per_device,
            "tokens-per-second-per-device": self.tokens_per_second_per_device,
        }
        return {name: value for name, value in values.items() if value is not None}


def format_log_line(record: LogRecord, *, now: datetime | None = None) -> str:
    """Format the line of a record: Megatron-LM's fields with its digits in its order, then ours."""
    time = (now or datetime.now()).strftime("%Y-%m-%d %H:%M:%S.%f")
    parts = [
        f" [{time}] iteration {record.iteration:8d}/{record.train_iters:8d}",
        f"consumed samples: {record.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {record.ms_per_iteration:.1f}",
    ]
    if record.tflops_per_device is not None:
        parts.append(f"throughput per GPU (TFLOP/s/GPU): {record.tflops_per_device:.1f}")
    parts += [
        f"learning rate: {record.learning_rate:.6E}",
        f"global batch size: {record.global_batch_size:5d}",
        f"lm loss: {record.loss:.6E}",
        *(
            f"{name}: {loss:.6E}" if name.endswith(" loss") else f"{name}: {loss:.2f}"
            for name, loss in record.auxiliary_losses.items()
        ),
        f"loss scale: {record.loss_scale:.1f}",
    ]
    if record.grad_norm is not None:
        parts.append(f"grad norm: {record.grad_norm:.3f}")
    if record.num_zeros is not None:
        parts.append(f"num zeros: {record.num_zeros:.1f}")
    if record.params_norm is not None:
        parts.append(f"params norm: {record.params_norm:.3f}")
    parts += [
        f"number of skipped iterations: {record.skipped_iterations:3d}",
        f"number of nan iterations: {record.nan_iterations:3d}",
    ]
    return " | ".join(parts + _own_fields(record)) + " |"


def _own_fields(record: LogRecord) -> list[str]:
    """Format what Megatron-LM's lines do not have; digits enough to compare two runs, also on slow devices."""
    fields = []
    if record.decoupled_learning_rate is not None:
        fields.append(f"decoupled learning rate: {record.decoupled_learning_rate:.6E}")
    if record.tokens_per_second_per_device is not None:
        fields.append(f"tokens per second per GPU (tokens/s/GPU): {record.tokens_per_second_per_device:.1f}")
    exact = {"loss": record.loss, "norm": record.grad_norm, **record.auxiliary_losses}
    fields += [f"exact {name}: {value:.9E}" for name, value in exact.items() if value is not None]
    return fields + [f"{kind} (MiB): {mebibytes:.1f}" for kind, mebibytes in record.memory.items()]


def format_evaluation(where: str, loss: float, *, suffix: str = "") -> str:
    """Format the three lines of an evaluation.

    Args:
        where: "iteration 10" or "iteration 10 on validation set".
        loss: mean over all tokens.
        suffix: "-name" of one of several validation sets.
    """
    perplexity = math.exp(min(20.0, loss))
    line = f" validation{suffix} loss at {where} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity:.6E} | "
    bar = "-" * (len(line) + 1)
    return f"{bar}\n{line}\n{bar}"
