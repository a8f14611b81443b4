"""Megatron-FSDP's import path of its functions."""

from megatron.core.distributed.fsdp.src.elsewhere import told_by
from megatron.core.distributed.fsdp.src.version1 import (
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
    fully_shard_model,
    fully_shard_optimizer,
)

__all__ = ["MixedPrecisionPolicy", "ShardingStrategy", "fully_shard", "fully_shard_model", "fully_shard_optimizer"]

__getattr__ = told_by("fully_shard", __all__)
