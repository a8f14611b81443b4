"""Megatron-FSDP's import path of version 2's order of modules."""

from megatron.core.distributed.fsdp.src.version2 import IndexedOrder

__all__ = ["IndexedOrder"]
