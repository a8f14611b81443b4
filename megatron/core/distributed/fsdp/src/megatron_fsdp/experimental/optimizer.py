"""Megatron-FSDP's import path of version 2's optimizers."""

from megatron.core.distributed.fsdp.src.version2 import fully_shard_optimizer

__all__ = ["fully_shard_optimizer"]
