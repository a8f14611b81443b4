"""Megatron-Core's import path of the adapter, which lives in ``adapter/fully_sharded_data_parallel.py``."""

from megatron.core.distributed.fsdp.adapter.fully_sharded_data_parallel import FullyShardedDataParallel

__all__ = ["FullyShardedDataParallel"]
