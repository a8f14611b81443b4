"""Streams on which work starts late, at random and differently on each rank: a missing wait then shows in the numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp.comm.streams import CudaStreams, Mark, Role

# About a millisecond on a GPU of 1 to 2 GHz: longer than any kernel of a small model.
_DELAY_CYCLES = 2_000_000


class DelayedStreams(CudaStreams):
    """Sleeps before and after gathers, reductions and updates, and before whatever compute tells others of."""

    mark_class = Mark  # which calls ``record``

    def __init__(self, device: torch.device, *, one_for_communication: bool = False) -> None:
        super().__init__(device, one_for_communication=one_for_communication)
        self._random = random.Random(dist.get_rank())

    def _delay(self) -> None:
        if self._random.random() < 0.5:
            torch.cuda._sleep(self._random.randrange(_DELAY_CYCLES))

    @contextmanager
    def on(self, role: Role) -> Iterator[None]:
        with super().on(role):
            self._delay()
            yield
            self._delay()

    def record(self, role: Role, *options: Any, **named: Any) -> Any:
        if role is Role.COMPUTE:
            with torch.cuda.stream(self.queues[role]):
                self._delay()
        return super().record(role, *options, **named)
