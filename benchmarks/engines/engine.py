"""The interface of the engines that are compared: a model and its optimizer, trained a step at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from benchmarks.engines.plain_gpt import GptShape

# Tokens and labels [1, t] of each microbatch.
Batch = Sequence[tuple[Tensor, Tensor]]

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Settings that all engines of a run share."""

    shape: GptShape
    mesh: DeviceMesh
    device: torch.device
    learning_rate: float
    seed: int
    num_microbatches: int = 1
    """Of a step: with one, nothing is accumulated."""


class StepResult(NamedTuple):
    """Results of a step, on the device."""

    loss: Tensor
    """[] mean of this rank's microbatches."""
    grad_norm: Tensor | None
    """[] of the whole model's gradient, where it was asked for."""


class MemoryPlan(NamedTuple):
    """Memory that an engine has planned on this rank."""

    text: str
    at_rest: int
    """Bytes between steps."""


class Engine:
    """A model and its optimizer, trained a step at a time. Ranks: all of the mesh, alike."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    mark: Callable[[str], None] = staticmethod(lambda phase: None)
    """Called with the name of each phase of a step that the host has just ended."""

    def scope(self, *, is_first: bool, is_last: bool) -> AbstractContextManager[Any]:
        """Return the scope around forward and backward of one microbatch."""
        return nullcontext()

    def step(self, batch: Batch, *, with_norm: bool = False) -> StepResult:
        """Run one optimizer step, without waiting for the device."""
        losses = []
        for index, (tokens, labels) in enumerate(batch):
            with self.scope(is_first=index == 0, is_last=index == len(batch) - 1):
                loss = self.model(tokens, labels) / len(batch)
                self.mark("forward")
                loss.backward()
                self.mark("backward")
            losses.append(loss.detach())
        norm = self.grad_norm() if with_norm else None
        self.optimizer.step()
        self.zero_grad()
        self.after_step()
        self.mark("optimizer")
        return StepResult(losses[0] if len(losses) == 1 else torch.stack(losses).sum(), norm)

    def zero_grad(self) -> None:
        """Free all gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def after_step(self) -> None:
        """Do what a training loop does between a step and the next forward."""

    def grad_norm(self) -> Tensor:
        """Return the norm [] of the whole model's gradient, between backward and update. Ranks: all."""
        total: Tensor | None = None
        for parameter in self.model.parameters():
            grad = parameter.grad
            if grad is not None:
                local = grad.to_local() if isinstance(grad, DTensor) else grad
                square = local.detach().float().pow(2).sum()
                total = square if total is None else total + square
        assert total is not None, "a norm is taken between backward and update"
        dist.all_reduce(total)
        return total.sqrt()

    def memory_plan(self) -> MemoryPlan | None:
        """Return the memory that the engine planned, after its first step; None if it plans none."""
        return None

    def close(self) -> None:
        """Give back what would outlive this object: process groups, registered memory. Ranks: all."""


def adamw(parameters: Any, settings: EngineSettings, **options: Any) -> torch.optim.Optimizer:
    """Build PyTorch's AdamW for engines that have no optimizer of their own."""
    return torch.optim.AdamW(
        parameters, lr=settings.learning_rate, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True, **options
    )
