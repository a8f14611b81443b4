"""Megatron-FSDP's import path of version 2's layouts."""

from megatron.core.distributed.fsdp.src.version2 import GlobalLayout, non_leading_numel

__all__ = ["GlobalLayout", "non_leading_numel"]
