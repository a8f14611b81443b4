"""Megatron-FSDP's import path of its functions."""

from megatron.core.distributed.fsdp.compat.version1 import (
    ShardingStrategy,
    fully_shard,
    fully_shard_model,
    fully_shard_optimizer,
)

__all__ = ["ShardingStrategy", "fully_shard", "fully_shard_model", "fully_shard_optimizer"]
