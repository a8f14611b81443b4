"""Data parallelism under Megatron-Core's import paths."""

from typing import TYPE_CHECKING, Any

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig

if TYPE_CHECKING:
    from megatron.core.distributed.fsdp import FullyShardedDataParallel

__all__ = ["DistributedDataParallelConfig", "FullyShardedDataParallel"]


def __getattr__(name: str) -> Any:
    """Import the adapter on first use: only it needs Megatron's model, and the engine below this package must not."""
    if name == "FullyShardedDataParallel":
        from megatron.core.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
