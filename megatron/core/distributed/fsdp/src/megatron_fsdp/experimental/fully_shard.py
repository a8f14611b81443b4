"""Megatron-FSDP's import path of version 2's functions."""

from megatron.core.distributed.fsdp.src.version2 import Placements, fully_shard, fully_shard_context, microbatch

__all__ = ["Placements", "fully_shard", "fully_shard_context", "microbatch"]
