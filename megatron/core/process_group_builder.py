"""Builder of a run's process groups from its grid of ranks."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core.nccl_settings import NcclSettings, collnet
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
    grid: RankGrid,
    *,
    timeout: timedelta | None = None,
    create_all_gather_group: bool = False,
    nccl: NcclSettings | None = None,
) -> ProcessGroupCollection:
    """Build the process groups of ``grid`` that contain this rank; None for degrees of one rank.

    Process groups of the same ranks are one object where they serve the same purpose. The all-gather groups have the
    ranks over which weights are sharded: those of the inner axis under hybrid sharding.

    Args:
        timeout: how long collectives wait for a rank; None: torch.distributed's default.
        create_all_gather_group: also make ``dp_cp_ag``, and ``expt_dp_ag`` where experts are split.
        nccl: SHARP and communicator options. A group with options gets a separate communicator.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: the grid's number of ranks is not the run's, or the run does not support the settings in ``nccl``.

    Ranks: all of the run, with equal arguments; blocks until all ranks of its groups have joined. The caller destroys them.
    Source: ours; the groups are those of Megatron-Core's parallel_state, which keeps them in globals.
    """
    everyone = ProcessGroupCollection.data_parallel().dp_cp
    assert everyone is not None
    if dist.get_world_size() != grid.world_size:
        raise ValueError(f"the grid must have all {dist.get_world_size()} ranks, got one of {grid.world_size}")
    settings = nccl or NcclSettings()
    settings.check(num_replicas=grid.num_distributed_optimizer_instances)
    engine, model = GroupMaker(grid, timeout, everyone, nccl=settings), GroupMaker(grid, timeout, nccl=settings)
    if settings.sharp_group is not None:
        # Before any other group: NCCL enables CollNet only for the first communicator.
        with collnet() as groups:
            name = _name_of_sharp_group(settings.sharp_group, grid)
            groups += [own] if (own := engine.make(name, separate=True)) is not None else []
    made: dict[str, Any] = {}
    for names, maker in ((_ENGINE_GROUPS, engine), (_MODEL_GROUPS, model)):
        for name in names:
            if (grid.size(name) > 1 or name in _GROUPS_OF_ONE) and _is_asked_for(name, grid):
                made[name] = maker.make(name)
    collection = ProcessGroupCollection(**made)
    return _with_all_gather_groups(collection, timeout, settings) if create_all_gather_group else collection


def _name_of_sharp_group(asked: str, grid: RankGrid) -> str:
    """Return the group for SHARP. With replicas, gradients are reduce-scattered within a replica and all-reduced between replicas."""
    if asked == "dp_replica":
        return "inter_dist_opt"
    return "intra_dp_cp" if grid.num_distributed_optimizer_instances > 1 else "dp_cp"


def _is_asked_for(name: str, grid: RankGrid) -> bool:
    if name == "tp_dp_cp":  # all ranks, or those of dp_cp, otherwise
        return grid.pipeline_model_parallel_size > 1 and grid.tensor_model_parallel_size > 1
    return name not in _HYBRID_GROUPS or grid.num_distributed_optimizer_instances > 1


def _with_all_gather_groups(
    groups: ProcessGroupCollection, timeout: timedelta | None, nccl: NcclSettings
) -> ProcessGroupCollection:
    """Add process groups for all-gathers alone; experts share the dense one where their ranks are the same."""
    sharding, expert_sharding = groups.intra_dp_cp or groups.dp_cp, groups.intra_expt_dp or groups.expt_dp
    if group_size(sharding) == group_size(expert_sharding) == 1:
        return groups
    names = ["dp_cp"] if expert_sharding is sharding else ["dp_cp", "ep_dp"]
    configs = {name: nccl.communicators[name] for name in names if name in nccl.communicators}
    dense, expert = create_all_gather_groups(True, timeout, configs, pg_collection=groups)
    shared = dense if expert_sharding is sharding else None
    return replace(groups, dp_cp_ag=dense, expt_dp_ag=expert or shared)


class GroupMaker:
    """A maker of process groups, one for each set of ranks: [Note: one group for each rank] in own_process_group.py.

    Args:
        timeout: how long collectives wait for a rank; None: torch.distributed's default.
        everyone: a group of all ranks, to be used where a group has all.
        nccl: communicator options.
    """

    def __init__(
        self,
        grid: RankGrid,
        timeout: timedelta | None,
        everyone: ProcessGroup | None = None,
        *,
        nccl: NcclSettings | None = None,
    ) -> None:
        self.grid, self.timeout, self._nccl = grid, timeout, nccl or NcclSettings()
        self._made: dict[Any, ProcessGroup | None] = {}
        self._own: dict[str, ProcessGroup | None] = {}  # by name: groups that are not shared with an earlier name
        if everyone is not None:
            self._made[_key(np.arange(grid.world_size).reshape(1, -1))] = everyone

    def make(self, name: str, *, separate: bool = False) -> ProcessGroup | None:
        """Make the group of this name that contains this rank; return None if there is none. Ranks: all of the run.

        Args:
            separate: make a new group even if one of the same ranks exists; later names of these ranks share the new one.
        """
        if name in self._own:
            return self._own[name]
        # Groups of two names that are the same on one rank are so on all: those of a name are one group, shifted.
        key = _key(self.grid.groups(name))
        options = self._nccl.options_of(name)
        if key not in self._made or separate or options is not None:
            ranks = self.grid.ranks(name, dist.get_rank())
            settings = {} if options is None else {"pg_options": options}
            self._made[key] = make_own_group(ranks, timeout=self.timeout, group_desc=name.upper(), **settings)
            if settings or separate:
                self._own[name] = self._made[key]
        return self._made[key]


def _key(groups: Groups) -> tuple[tuple[int, ...], bytes]:
    return groups.shape, groups.tobytes()
