"""Megatron-FSDP's import path of its dtypes."""

from megatron.core.distributed.fsdp.compat.elsewhere import told_by
from megatron.core.distributed.fsdp.compat.version1 import (
    MixedPrecisionPolicy,
    is_te_min_version,
)

__all__ = ["MixedPrecisionPolicy", "is_te_min_version"]

__getattr__ = told_by("mixed_precision", __all__)
