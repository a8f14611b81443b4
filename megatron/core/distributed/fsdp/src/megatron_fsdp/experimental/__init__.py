"""Megatron-FSDP's import path of its version 2; ``import_paths.py`` makes the submodules."""

from typing import TYPE_CHECKING, Any

from megatron.core.distributed.fsdp.adapter.megatron_fsdp_v2 import (
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    load_checkpoint,
    microbatch,
    save_checkpoint,
)
from megatron.core.distributed.fsdp.compat.dbuffer import DBuffer
from megatron.core.distributed.fsdp.config.placement import Placements
from megatron.core.distributed.fsdp.src.import_paths import VERSION_2, make_submodules

__all__ = [
    "DBuffer",
    "Placements",
    "fully_shard",
    "fully_shard_context",
    "fully_shard_optimizer",
    "load_checkpoint",
    "microbatch",
    "save_checkpoint",
]

make_submodules(__name__, VERSION_2)

if TYPE_CHECKING:  # checkers find no files of the submodules

    def __getattr__(name: str) -> Any: ...
