"""The process groups of a run, passed to whatever needs them; there are no process-group globals."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup


@dataclass(kw_only=True)
class ProcessGroupCollection:
    """One process group per way of splitting the work, each holding this rank; None where a split is not used.

    Attributes:
        tp, pp, cp, ep: tensor, pipeline, context and expert parallelism.
        mp: tensor and pipeline together.
        dp, dp_cp: data parallelism of dense parameters, without and with context parallelism.
        expt_tp, expt_dp: tensor and data parallelism of expert parameters.
        intra_dp_cp, intra_expt_dp: the inner (sharding) axis of hybrid sharding, dense and expert.
        inter_dist_opt: its outer (replicating) axis.
        dp_cp_ag, expt_dp_ag: the ranks of ``dp_cp`` and ``expt_dp``, for all-gathers alone.

    The groups belong to whoever made the collection, who destroys them.
    """

    tp: ProcessGroup | None = None
    pp: ProcessGroup | None = None
    cp: ProcessGroup | None = None
    ep: ProcessGroup | None = None
    mp: ProcessGroup | None = None
    dp: ProcessGroup | None = None
    dp_cp: ProcessGroup | None = None
    expt_tp: ProcessGroup | None = None
    expt_dp: ProcessGroup | None = None
    intra_dp_cp: ProcessGroup | None = None
    intra_expt_dp: ProcessGroup | None = None
    inter_dist_opt: ProcessGroup | None = None
    dp_cp_ag: ProcessGroup | None = None
    expt_dp_ag: ProcessGroup | None = None

    @classmethod
    def data_parallel(cls) -> ProcessGroupCollection:
        """A collection in which all ranks are data-parallel and nothing else is split.

        Raises:
            RuntimeError: torch.distributed is not initialised.

        Ranks: all; communicates nothing, since the groups are the default one.
        """
        if not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed must be initialised before process groups are collected; call "
                "torch.distributed.init_process_group() in a program started with torchrun"
            )
        world = dist.group.WORLD
        return cls(dp=world, dp_cp=world)
