"""Megatron-FSDP's import path of version 2's buffers."""

from megatron.core.distributed.fsdp.compat.version2 import DBuffer

__all__ = ["DBuffer"]
