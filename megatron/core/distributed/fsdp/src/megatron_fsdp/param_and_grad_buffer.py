"""Megatron-FSDP's import path of its buffers."""

from megatron.core.distributed.fsdp.compat.version1 import ParamAndGradBuffer

__all__ = ["ParamAndGradBuffer"]
