"""WeightVersions: which version of the weights a step computes with, and when the next one begins."""

from __future__ import annotations

from megatron.core.distributed.fsdp.runtime.streams import CudaStreams, Streams
from megatron.core.distributed.fsdp.runtime.unsharder import Unsharder


class WeightVersions:
    """Opens the unsharder's epochs, one for each step.

    Attributes:
        num_scopes: microbatch scopes that are open; within one, a forward opens no weight_version.
        is_prepared: the next forward or microbatch uses the weight_version that was opened for it.
    """

    def __init__(self, streams: Streams, unsharder: Unsharder) -> None:
        self.streams, self.unsharder = streams, unsharder
        self.num_scopes = 0
        self.is_prepared = False

    def open(self, *, prepares: bool = False) -> None:
        """Afterwards gathers see the weights as compute leaves them now.

        Args:
            prepares: for the next step, whose gathers may begin at once.
        """
        if isinstance(self.streams, CudaStreams):
            self.streams.follow_caller()
        self.unsharder.begin_weight_version()
        self.is_prepared = prepares

    def begin(self, *, is_first: bool = True) -> None:
        """Afterwards what runs next (``is_first``: of a step) uses the prepared weight_version, if there is one, or its own.

        Raises:
            RuntimeError: weights were written after the weight_version was prepared.
        """
        if not self.is_prepared:
            if is_first:
                self.open()
            return
        self.is_prepared = False
        for group in self.unsharder.live:
            if group.main_write_count != group.synced_write_count and not group.held_by_user:
                raise RuntimeError(
                    f"weights of {group} were written after start_param_sync had begun to gather them, so that forward would "
                    "read the old ones; call start_param_sync after the optimizer's step, or use fully_shard_optimizer"
                )
