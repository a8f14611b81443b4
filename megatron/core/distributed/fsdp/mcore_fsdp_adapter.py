"""Megatron-Core's import path of the adapter, one engine under all its names, which lives in ``adapter/fully_sharded_data_parallel.py``."""

from megatron.core.distributed.fsdp.adapter.fully_sharded_data_parallel import FullyShardedDataParallel

FullyShardedDataParallelV1 = FullyShardedDataParallelV2 = FullyShardedDataParallel

__all__ = ["FullyShardedDataParallel", "FullyShardedDataParallelV1", "FullyShardedDataParallelV2"]
