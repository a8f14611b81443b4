"""Megatron-FSDP's import path of version 2's modules."""

from megatron.core.distributed.fsdp.src.version2 import FsdpContext, FsdpModule

__all__ = ["FsdpContext", "FsdpModule"]
