"""Fully sharded data parallelism. Start with ``fully_shard``; how it works stands in DESIGN.md and SCHEDULE.md."""

from megatron.core.distributed.fsdp.checkpoint import load_checkpoint, save_checkpoint
from megatron.core.distributed.fsdp.context import FsdpContext
from megatron.core.distributed.fsdp.dbuffer import DBuffer
from megatron.core.distributed.fsdp.distributed_index import FSDPDistributedIndex
from megatron.core.distributed.fsdp.flat_adamw import FlatAdamW
from megatron.core.distributed.fsdp.fully_shard import fully_shard, fully_shard_context, microbatch
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.distributed.fsdp.mixed_precision import MixedPrecisionPolicy
from megatron.core.distributed.fsdp.module import FsdpModule
from megatron.core.distributed.fsdp.optimizer import fully_shard_optimizer
from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.placement import Placements, hybrid_placements

__all__ = [
    "DBuffer",
    "FSDPDistributedIndex",
    "FlatAdamW",
    "FsdpContext",
    "FsdpModule",
    "FsdpParameterGroup",
    "FullyShardedDataParallel",
    "MixedPrecisionPolicy",
    "Placements",
    "fully_shard",
    "fully_shard_context",
    "fully_shard_optimizer",
    "hybrid_placements",
    "load_checkpoint",
    "microbatch",
    "save_checkpoint",
]
