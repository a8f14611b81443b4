"""Megatron-FSDP's import path of its wrapper."""

from megatron.core.distributed.fsdp.compat.version1 import MegatronFSDP

__all__ = ["MegatronFSDP"]
