"""Megatron-FSDP's import path of version 2's buffers."""

from megatron.core.distributed.fsdp.src.version2 import DBuffer, Flat

__all__ = ["DBuffer", "Flat"]
