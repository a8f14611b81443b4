"""The strategies of DCP's format, under Megatron-Core's names: ``save`` and ``load`` do the same without them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.core import BACKEND, VERSION
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, StateDict


class TorchDistSaveShardedStrategy:
    """Save in DCP's format.

    Args:
        backend, version: must be those of this format.
        keep_only_main_replica, thread_count, cached_metadata, separation_hint, nvrx_validation: accepted; main replicas are
            saved, by one thread for each rank, and nothing is cached.
    """

    can_handle_sharded_objects = True

    def __init__(
        self,
        backend: str = BACKEND,
        version: int = VERSION,
        keep_only_main_replica: bool = True,
        thread_count: int = 2,
        cached_metadata: bool = False,
        separation_hint: str | None = None,
        **hints: Any,
    ) -> None:
        if (backend, version) != (BACKEND, VERSION):
            raise NotImplementedError(
                f"checkpoints must be of {BACKEND} version {VERSION}, got {backend} version {version}"
            )
        self.backend, self.version = backend, version

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | os.PathLike[str]) -> None:
        """Save a sharded state dict. Ranks: all; blocks."""
        serialization.save(sharded_state_dict, checkpoint_dir)


class TorchDistLoadShardedStrategy:
    """Load from DCP's format; arguments are accepted."""

    can_handle_sharded_objects = True

    def __init__(self, *hints: Any, **further_hints: Any) -> None:
        pass

    def load(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | os.PathLike[str], *hints: Any
    ) -> StateDict:
        """Load what a sharded state dict asks for. Ranks: each on its own."""
        loaded: StateDict = serialization.load(sharded_state_dict, checkpoint_dir)
        return loaded

    def load_tensors_metadata(self, checkpoint_dir: str | os.PathLike[str], *hints: Any) -> dict[str, ShardedTensor]:
        """Return the whole tensors of a checkpoint by key, without data."""
        return serialization.load_tensors_metadata(Path(checkpoint_dir))
