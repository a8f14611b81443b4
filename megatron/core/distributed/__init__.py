"""Data parallelism in its forms."""

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.fsdp.adapter.fully_sharded_data_parallel import FullyShardedDataParallel

__all__ = ["DistributedDataParallelConfig", "FullyShardedDataParallel"]
