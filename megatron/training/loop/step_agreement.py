"""What all ranks agree on after each step: losses that are not finite, a signal to end, time that is over.

Ranks must take the same decisions, and the host should not wait for the device within a step. So each rank puts its
marks into a small vector that is summed over ranks, and reads it one step later, when the sum is long done.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from types import FrameType

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.delayed_read import DelayedRead


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """The same on all ranks."""

    end_requested: str | None
    """Why training should save and end; None: it goes on."""


class TerminationSignal:
    """Remembers that SIGTERM came, instead of dying from it."""

    def __init__(self) -> None:
        self.received = False
        self._previous = signal.signal(signal.SIGTERM, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.received = True

    def restore(self) -> None:
        """SIGTERM does what it did before."""
        signal.signal(signal.SIGTERM, self._previous)


class StepAgreement:
    """Collects marks of all ranks step by step.

    Args:
        check_finite: losses and gradient norms that are not finite end training with an error on all ranks.
        termination: ends training when any rank has received the signal.
        duration_mins: ends training so many minutes after ``start_time`` (``time.time()``) on any rank.

    Ranks: all make the same calls in the same order.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        check_finite: bool,
        termination: TerminationSignal | None = None,
        duration_mins: float | None = None,
        start_time: float | None = None,
    ) -> None:
        self.device, self.check_finite, self.termination = device, check_finite, termination
        self.deadline = None if duration_mins is None else (start_time or time.time()) + 60.0 * duration_mins
        self.num_ranks, self.rank = dist.get_world_size(), dist.get_rank()
        self._posted: tuple[int, DelayedRead] | None = None

    @property
    def is_needed(self) -> bool:
        """False where there is nothing to agree on, and ``post`` does nothing."""
        return self.check_finite or self.termination is not None or self.deadline is not None

    @torch.no_grad()
    def post(self, iteration: int, loss: Tensor, grad_norm: Tensor) -> None:
        """The marks of this rank after ``iteration`` are on their way; does not block the host.

        Args:
            loss: [] this rank's loss.
            grad_norm: [] the whole model's, the same on all ranks.
        """
        if not self.is_needed:
            return
        marks = torch.zeros(self.num_ranks + 3, device=self.device)
        if self.check_finite:
            marks[self.rank].copy_(~torch.isfinite(loss))
            marks[self.num_ranks].copy_(~torch.isfinite(grad_norm))
        if self.termination is not None and self.termination.received:
            marks[self.num_ranks + 1].fill_(1.0)
        if self.deadline is not None and time.time() > self.deadline:
            marks[self.num_ranks + 2].fill_(1.0)
        dist.all_reduce(marks)
        self._posted = (iteration, DelayedRead(marks))

    def collect(self) -> Agreement:
        """What the marks posted last say; blocks until they have arrived.

        Raises:
            RuntimeError: on all ranks, if a loss or the gradient was not finite.
        """
        if self._posted is None:
            return Agreement(end_requested=None)
        iteration, marks = self._posted
        self._posted = None
        *losses, gradient, terminated, late = marks.values()
        self._raise_if_not_finite(iteration, [rank for rank, mark in enumerate(losses) if mark], bool(gradient))
        if terminated:
            return Agreement(end_requested="SIGTERM was received")
        return Agreement(end_requested="--exit-duration-in-mins is over" if late else None)

    def _raise_if_not_finite(self, iteration: int, ranks: list[int], gradient: bool) -> None:
        if not ranks and not gradient:
            return
        what = f"the loss on ranks {ranks}" if ranks else "the norm of the gradient (losses were finite)"
        raise RuntimeError(
            f"loss and gradient must be finite, got a NaN or infinity in iteration {iteration}: {what}; no checkpoint "
            "holds it. Lower the learning rate, look at the data of this iteration, or go on at your own risk with "
            "--no-check-for-nan-in-loss-and-grad"
        )
