"""Makes the process groups of a run from its grid of ranks."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core.process_groups_config import ProcessGroupCollection, create_all_gather_groups, group_size
from megatron.core.rank_grid import RankGrid

# Groups that the engine reduces and gathers over, beside the model's computation. They share no communicator with the
# model's own, even where the ranks are the same: one communicator runs its collectives one after the other.
_ENGINE_GROUPS = (
    "dp_cp",
    "dp",
    "expt_dp",
    "intra_dp_cp",
    "intra_expt_dp",
    "inter_dist_opt",
    "inter_expt_dist_opt",
    "embd",
)
_MODEL_GROUPS = ("tp", "cp", "ep", "pp", "expt_tp", "tp_cp", "tp_ep", "mp")
_HYBRID_GROUPS = ("intra_dp_cp", "intra_expt_dp", "inter_dist_opt", "inter_expt_dist_opt")
# The engine shards over these also where they are one rank.
_GROUPS_OF_ONE = ("dp_cp", "dp", "expt_dp", "intra_dp_cp", "intra_expt_dp")


def build_process_groups(
    grid: RankGrid, *, timeout: timedelta | None = None, create_all_gather_group: bool = False
) -> ProcessGroupCollection:
    """The groups of ``grid`` that hold this rank; None for splits that are not used.

    Groups of the same ranks are one group where they serve the same purpose. The all-gather groups, where asked for,
    mirror the axis over which weights are sharded: the inner one under hybrid sharding.

    Args:
        timeout: how long collectives wait for a rank; torch.distributed's default when None.
        create_all_gather_group: also make ``dp_cp_ag``, and ``expt_dp_ag`` where experts are split.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: the grid is of another number of ranks than there are.

    Ranks: all of the run, with equal arguments; blocks until the ranks of its groups have come. The caller destroys the groups.
    Source: ours; the groups are those of Megatron-Core's parallel_state, which keeps them in globals.
    """
    everyone = ProcessGroupCollection.data_parallel().dp_cp
    assert everyone is not None
    if dist.get_world_size() != grid.world_size:
        raise ValueError(f"the grid must be of all {dist.get_world_size()} ranks, got one of {grid.world_size}")
    engine = _GroupMaker(timeout, {tuple(range(grid.world_size)): everyone})
    model = _GroupMaker(timeout, {})
    made: dict[str, ProcessGroup | None] = {}
    for names, maker in ((_ENGINE_GROUPS, engine), (_MODEL_GROUPS, model)):
        for name in names:
            if name in _HYBRID_GROUPS and grid.num_distributed_optimizer_instances == 1:
                continue
            if grid.size(name) > 1 or name in _GROUPS_OF_ONE:
                made[name] = maker.make(name, grid)
    collection = ProcessGroupCollection(**made)
    return _with_all_gather_groups(collection, timeout) if create_all_gather_group else collection


def _with_all_gather_groups(groups: ProcessGroupCollection, timeout: timedelta | None) -> ProcessGroupCollection:
    """The collection with groups for all-gathers alone; experts share the dense one where their ranks are the same."""
    sharding, expert_sharding = groups.intra_dp_cp or groups.dp_cp, groups.intra_expt_dp or groups.expt_dp
    if group_size(sharding) == group_size(expert_sharding) == 1:
        return groups
    dense, expert = create_all_gather_groups(for_expert_parallelism=True, timeout=timeout, pg_collection=groups)
    shared = dense if expert_sharding is sharding else None
    return replace(groups, dp_cp_ag=dense, expt_dp_ag=expert or shared)


class _GroupMaker:
    """Makes each group of ranks once; every rank takes part in making all of them, in one order."""

    def __init__(self, timeout: timedelta | None, made: dict[tuple[int, ...], ProcessGroup]) -> None:
        self.timeout, self.made = timeout, made

    def make(self, name: str, grid: RankGrid) -> ProcessGroup | None:
        """This rank's group of the name; None where it is in none."""
        own: ProcessGroup | None = None
        for ranks in grid.groups(name).tolist():
            key = tuple(ranks)
            if key not in self.made:
                self.made[key] = dist.new_group(ranks, timeout=self.timeout, group_desc=name.upper())
            if dist.get_rank() in key:
                own = self.made[key]
        return own
