"""Which version of the weights a step computes with, and when the next version begins."""

from __future__ import annotations

from megatron.core.distributed.fsdp.comm.streams import CudaStreams, Streams
from megatron.core.distributed.fsdp.runtime.unsharder import Unsharder


class WeightVersions:
    """Counts the versions of the weights, one for each step.

    Attributes:
        num_scopes: microbatch scopes that are open; within one, a forward begins no version.
        is_prepared: the next forward or microbatch uses the version that was begun for it.
    """

    def __init__(self, streams: Streams, unsharder: Unsharder) -> None:
        self.streams, self.unsharder = streams, unsharder
        self.num_scopes = 0
        self.is_prepared = False

    def begin(self, *, prepares: bool = False) -> None:
        """Begin a version: all-gathers see the weights as compute leaves them now.

        Args:
            prepares: for the next step, whose all-gathers may begin at once.
        """
        if isinstance(self.streams, CudaStreams):
            self.streams.follow_caller()
        self.unsharder.begin_weight_version()
        self.is_prepared = prepares

    def begin_pass(self, *, is_first: bool = True) -> None:
        """Use the version that was prepared, or (``is_first`` of a step) begin another one.

        Raises:
            RuntimeError: weights were written after the version was prepared.
        """
        if not self.is_prepared:
            if is_first:
                self.begin()
            return
        self.is_prepared = False
        for group in self.unsharder.live:
            weights = group.weights
            if weights.write_count != weights.synced_write_count and not weights.held_by_user:
                raise RuntimeError(
                    f"weights of {group} were written after start_param_sync had begun to gather them, so that forward would "
                    "read the old ones; call start_param_sync after the optimizer's step, or use fully_shard_optimizer"
                )
