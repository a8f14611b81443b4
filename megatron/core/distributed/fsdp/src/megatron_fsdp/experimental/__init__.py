"""Megatron-FSDP's import path of its version 2."""

from megatron.core.distributed.fsdp.compat.version2 import (
    DBuffer,
    Placements,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    load_checkpoint,
    microbatch,
    save_checkpoint,
)

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
