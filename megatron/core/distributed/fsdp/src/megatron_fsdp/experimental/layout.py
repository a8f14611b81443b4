"""Megatron-FSDP's import path of version 2's layouts."""

from megatron.core.distributed.fsdp.compat.elsewhere import told_by
from megatron.core.distributed.fsdp.compat.version2 import (
    GlobalLayout,
)

__all__ = ["GlobalLayout"]

__getattr__ = told_by("experimental.layout", __all__)
