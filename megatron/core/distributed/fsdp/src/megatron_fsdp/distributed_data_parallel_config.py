"""Megatron-FSDP's import path of its settings."""

from megatron.core.distributed.fsdp.src.version1 import DistributedDataParallelConfig

__all__ = ["DistributedDataParallelConfig"]
