"""Megatron-FSDP's import path of its version 2.

A submodule that has the name of a function is imported here, so that importing it later does not put it in the function's place.
"""

from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.fully_shard import (
    Placements,
    fully_shard,
    fully_shard_context,
    microbatch,
)
from megatron.core.distributed.fsdp.src.version2 import (
    DBuffer,
    fully_shard_optimizer,
    load_checkpoint,
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
