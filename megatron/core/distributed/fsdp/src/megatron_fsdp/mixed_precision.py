"""Megatron-FSDP's import path of its dtypes."""

from megatron.core.distributed.fsdp.src.elsewhere import told_by
from megatron.core.distributed.fsdp.src.version1 import (
    MixedPrecisionPolicy,
    is_te_min_version,
)

HAVE_TE_MXFP8TENSOR = False
"""Whether weights in transformer-engine's MXFP8 tensors are gathered without conversion."""

__all__ = ["HAVE_TE_MXFP8TENSOR", "MixedPrecisionPolicy", "is_te_min_version"]

__getattr__ = told_by("mixed_precision", __all__)
