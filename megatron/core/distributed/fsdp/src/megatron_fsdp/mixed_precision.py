"""Megatron-FSDP's import path of its dtypes."""

from megatron.core.distributed.fsdp.compat.version1 import MixedPrecisionPolicy

__all__ = ["MixedPrecisionPolicy"]
