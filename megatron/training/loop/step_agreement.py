"""Agreement of all ranks after each step on non-finite losses, a termination signal and the time limit.

Ranks must take the same decisions, and the host should not wait for the device within a step. So each rank writes flags
into a small vector that is summed over ranks, and reads the sum one step later, when it has long been computed.
"""

from __future__ import annotations

import atexit
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
    """The common decision of all ranks."""

    end_requested: str | None
    """Why training should save and end; None: it continues."""


class TerminationSignal:
    """A handler of SIGTERM that records the signal instead of ending the process.

    It stays until the process ends, also after training: who ends a job may signal it more than once, and a rank that ends
    as it was asked to must not look like one that failed.
    """

    def __init__(self) -> None:
        self.received = False
        signal.signal(signal.SIGTERM, self._remember)
        atexit.register(
            signal.signal, signal.SIGTERM, signal.SIG_IGN
        )  # the interpreter's end takes back handlers in Python

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.received = True


class StepAgreement:
    """The exchange of flags between all ranks, once for each step.

    Args:
        check_finite: raise an error on all ranks if a loss or gradient norm is not finite.
        termination: end training when any rank has received the signal.
        duration_mins: end training this many minutes after ``start_time`` (``time.time()``) on any rank.

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
        """Whether there is anything to agree on; if not, ``post`` does nothing."""
        return self.check_finite or self.termination is not None or self.deadline is not None

    @torch.no_grad()
    def post(self, iteration: int, loss: Tensor, grad_norm: Tensor) -> None:
        """Start to sum this rank's flags after ``iteration`` over all ranks; does not block the host.

        Args:
            loss: [] this rank's loss.
            grad_norm: [] gradient norm of the whole model, the same on all ranks.
        """
        if not self.is_needed:
            return
        flags = torch.zeros(self.num_ranks + 3, device=self.device)
        if self.check_finite:
            flags[self.rank].copy_(~torch.isfinite(loss))
            flags[self.num_ranks].copy_(~torch.isfinite(grad_norm))
        if self.termination is not None and self.termination.received:
            flags[self.num_ranks + 1].fill_(1.0)
        if self.deadline is not None and time.time() > self.deadline:
            flags[self.num_ranks + 2].fill_(1.0)
        dist.all_reduce(flags)
        self._posted = (iteration, DelayedRead(flags))

    def collect(self) -> Agreement:
        """Return the decision that follows from the flags posted last; block until they have arrived.

        Raises:
            RuntimeError: on all ranks, if a loss or the gradient norm was not finite.
        """
        if self._posted is None:
            return Agreement(end_requested=None)
        iteration, flags = self._posted
        self._posted = None
        *losses, gradient, terminated, late = flags.values()
        self._raise_if_not_finite(iteration, [rank for rank, flag in enumerate(losses) if flag], bool(gradient))
        if terminated:
            return Agreement(end_requested="SIGTERM was received")
        return Agreement(end_requested="--exit-duration-in-mins is over" if late else None)

    def _raise_if_not_finite(self, iteration: int, ranks: list[int], gradient: bool) -> None:
        if not ranks and not gradient:
            return
        what = f"the loss on ranks {ranks}" if ranks else "the norm of the gradient (losses were finite)"
        raise RuntimeError(
            f"loss and gradient must be finite, got a NaN or infinity in iteration {iteration}: {what}; it is in no "
            "checkpoint. Lower the learning rate, look at the data of this iteration, or continue at your own risk with "
            "--no-check-for-nan-in-loss-and-grad"
        )
