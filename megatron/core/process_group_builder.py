"""Builder of a run's process groups from its grid of ranks."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core.own_process_group import make_own_group
from megatron.core.process_groups_config import ProcessGroupCollection, create_all_gather_groups, group_size
from megatron.core.rank_grid import Groups, RankGrid

# Process groups over which the engine reduces and gathers while the model computes. They share no communicator with the
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
_MODEL_GROUPS = ("tp", "cp", "ep", "pp", "expt_tp", "tp_cp", "tp_ep", "mp", "tp_dp_cp")
_HYBRID_GROUPS = ("intra_dp_cp", "intra_expt_dp", "inter_dist_opt", "inter_expt_dist_opt")
# The engine shards over these even if they have one rank.
_GROUPS_OF_ONE = ("dp_cp", "dp", "expt_dp", "intra_dp_cp", "intra_expt_dp")


def build_process_groups(
    grid: RankGrid, *, timeout: timedelta | None = None, create_all_gather_group: bool = False
) -> ProcessGroupCollection:
    """Build the process groups of ``grid`` that contain this rank; None for degrees of one rank.

    Process groups of the same ranks are one object where they serve the same purpose. The all-gather groups have the
    ranks over which weights are sharded: those of the inner axis under hybrid sharding.

    Args:
        timeout: how long collectives wait for a rank; None: torch.distributed's default.
        create_all_gather_group: also make ``dp_cp_ag``, and ``expt_dp_ag`` where experts are split.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: the grid has another number of ranks than the run.

    Ranks: all of the run, with equal arguments; blocks until all ranks of its groups have joined. The caller destroys them.
    Source: ours; the groups are those of Megatron-Core's parallel_state, which keeps them in globals.
    """
    everyone = ProcessGroupCollection.data_parallel().dp_cp
    assert everyone is not None
    if dist.get_world_size() != grid.world_size:
        raise ValueError(f"the grid must have all {dist.get_world_size()} ranks, got one of {grid.world_size}")
    engine, model = GroupMaker(grid, timeout, everyone), GroupMaker(grid, timeout)
    made: dict[str, Any] = {}
    for names, maker in ((_ENGINE_GROUPS, engine), (_MODEL_GROUPS, model)):
        for name in names:
            if (grid.size(name) > 1 or name in _GROUPS_OF_ONE) and _is_asked_for(name, grid):
                made[name] = maker.make(name)
    collection = ProcessGroupCollection(**made)
    return _with_all_gather_groups(collection, timeout) if create_all_gather_group else collection


def _is_asked_for(name: str, grid: RankGrid) -> bool:
    if name == "tp_dp_cp":  # all ranks, or those of dp_cp, otherwise
        return grid.pipeline_model_parallel_size > 1 and grid.tensor_model_parallel_size > 1
    return name not in _HYBRID_GROUPS or grid.num_distributed_optimizer_instances > 1


def _with_all_gather_groups(groups: ProcessGroupCollection, timeout: timedelta | None) -> ProcessGroupCollection:
    """Add process groups for all-gathers alone; experts share the dense one where their ranks are the same."""
    sharding, expert_sharding = groups.intra_dp_cp or groups.dp_cp, groups.intra_expt_dp or groups.expt_dp
    if group_size(sharding) == group_size(expert_sharding) == 1:
        return groups
    dense, expert = create_all_gather_groups(for_expert_parallelism=True, timeout=timeout, pg_collection=groups)
    shared = dense if expert_sharding is sharding else None
    return replace(groups, dp_cp_ag=dense, expt_dp_ag=expert or shared)


class GroupMaker:
    """A maker of process groups, one for each set of ranks: [Note: one group for each rank] in own_process_group.py.

    Args:
        timeout: how long collectives wait for a rank; None: torch.distributed's default.
        everyone: a group of all ranks, to be used where a group has all.
    """

    def __init__(self, grid: RankGrid, timeout: timedelta | None, everyone: ProcessGroup | None = None) -> None:
        self.grid, self.timeout = grid, timeout
        self._made: dict[Any, ProcessGroup | None] = {}
        if everyone is not None:
            self._made[_key(np.arange(grid.world_size).reshape(1, -1))] = everyone

    def make(self, name: str) -> ProcessGroup | None:
        """Make the group of this name that contains this rank; return None where there is none. Ranks: all of the run."""
        # Groups of two names that are the same on one rank are so on all: those of a name are one group, shifted.
        key = _key(self.grid.groups(name))
        if key not in self._made:
            own = self.grid.ranks(name, dist.get_rank())
            self._made[key] = make_own_group(own, timeout=self.timeout, group_desc=name.upper())
        return self._made[key]


def _key(groups: Groups) -> tuple[tuple[int, ...], bytes]:
    return groups.shape, groups.tobytes()
