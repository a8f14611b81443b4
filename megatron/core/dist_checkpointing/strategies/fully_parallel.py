"""Wrappers of strategies that divide the work among data-parallel ranks, under Megatron-Core's names.

Replicas of sharded parameters always share what is written, and each rank reads what it needs, so these wrappers only pass calls on.
"""

from __future__ import annotations

import os
from typing import Any

from torch.distributed import ProcessGroup

from megatron.core.dist_checkpointing.mapping import ShardedStateDict, StateDict


class FullyParallelSaveStrategyWrapper:
    """Save by ``strategy``; the other arguments are accepted."""

    def __init__(
        self,
        strategy: Any,
        parallelization_group: ProcessGroup | None = None,
        do_cache_distribution: bool = False,
        backend: str = "torch_dist",
        version: int = 1,
        validate_access_integrity: bool = True,
        pg_cache_path: str | None = None,
        pg_cache_create: bool = False,
    ) -> None:
        self.base_strategy, self.parallelization_group = strategy, parallelization_group

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | os.PathLike[str]) -> None:
        """Save a sharded state dict. Ranks: all; blocks."""
        self.base_strategy.save(sharded_state_dict, checkpoint_dir)


class FullyParallelLoadStrategyWrapper:
    """Load by ``strategy``; the other arguments are accepted."""

    def __init__(
        self,
        strategy: Any,
        parallelization_group: ProcessGroup | None = None,
        do_cache_distribution: bool = False,
        exchange_algo: str = "broadcast",
        per_rank_object_load: bool = False,
        pg_cache_path: str | None = None,
        pg_cache_create: bool = False,
    ) -> None:
        self.base_strategy, self.parallelization_group = strategy, parallelization_group

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | os.PathLike[str]) -> StateDict:
        """Load what a sharded state dict asks for. Ranks: each on its own."""
        loaded: StateDict = self.base_strategy.load(sharded_state_dict, checkpoint_dir)
        return loaded
