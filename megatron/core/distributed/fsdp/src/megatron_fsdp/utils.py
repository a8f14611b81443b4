"""Megatron-FSDP's import path of its index of meshes."""

from megatron.core.distributed.fsdp.compat.version1 import FSDPDistributedIndex

__all__ = ["FSDPDistributedIndex"]
