"""Data parallelism in its forms."""

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

__all__ = ["DistributedDataParallelConfig", "FullyShardedDataParallel"]
