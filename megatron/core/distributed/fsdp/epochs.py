"""Epochs: which version of the weights a step computes with, and when the next one begins."""

from __future__ import annotations

from megatron.core.distributed.fsdp.gatherer import Gatherer
from megatron.core.distributed.fsdp.streams import CudaStreams, Streams


class Epochs:
    """Opens the gatherer's epochs, one for each step.

    Attributes:
        num_scopes: microbatch scopes that are open; within one, a forward opens no epoch.
        is_prepared: the next forward or microbatch uses the epoch that was opened for it.
    """

    def __init__(self, streams: Streams, gatherer: Gatherer) -> None:
        self.streams, self.gatherer = streams, gatherer
        self.num_scopes = 0
        self.is_prepared = False

    def open(self, *, prepares: bool = False) -> None:
        """Afterwards gathers see the weights as compute leaves them now.

        Args:
            prepares: for the next step, whose gathers may begin at once.
        """
        if isinstance(self.streams, CudaStreams):
            self.streams.follow_caller()
        self.gatherer.new_epoch()
        self.is_prepared = prepares

    def begin(self, *, is_first: bool = True) -> None:
        """Afterwards what runs next (``is_first``: of a step) uses the prepared epoch, if there is one, or its own.

        Raises:
            RuntimeError: weights were written after the epoch was prepared.
        """
        if not self.is_prepared:
            if is_first:
                self.open()
            return
        self.is_prepared = False
        for group in self.gatherer.live:
            if group.main_version != group.synced_version and not group.pinned:
                raise RuntimeError(
                    f"weights of {group} were written after start_param_sync had begun to gather them, so that forward would "
                    "read the old ones; call start_param_sync after the optimizer's step, or use fully_shard_optimizer"
                )
