"""Fully sharded data parallelism. Start with ``fully_shard``; how it works stands in DESIGN.md and SCHEDULE.md."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron.core.distributed.fsdp.api.fully_shard import fully_shard, fully_shard_context, microbatch
from megatron.core.distributed.fsdp.api.module import FsdpModule
from megatron.core.distributed.fsdp.api.optimizer import fully_shard_optimizer
from megatron.core.distributed.fsdp.buffers.dbuffer import DBuffer
from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.checkpoint.entry_points import load_checkpoint, save_checkpoint
from megatron.core.distributed.fsdp.config.mixed_precision import MixedPrecisionPolicy
from megatron.core.distributed.fsdp.config.placement import Placements, hybrid_placements
from megatron.core.distributed.fsdp.flat_optimizer.flat_adamw import FlatAdamW
from megatron.core.distributed.fsdp.mesh.distributed_index import FSDPDistributedIndex
from megatron.core.distributed.fsdp.runtime.context import FsdpContext

if TYPE_CHECKING:
    from megatron.core.distributed.fsdp.adapter.fully_sharded_data_parallel import FullyShardedDataParallel

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


def __getattr__(name: str) -> Any:
    """Import the adapter when it is asked for: it alone needs Megatron's model, which ``fully_shard`` does without."""
    if name == "FullyShardedDataParallel":
        return import_module(
            "megatron.core.distributed.fsdp.adapter.fully_sharded_data_parallel"
        ).FullyShardedDataParallel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
