"""Megatron-FSDP's import path of version 2's placements."""

from megatron.core.distributed.fsdp.compat.elsewhere import told_by
from megatron.core.distributed.fsdp.compat.version2 import (
    Flat,
)

__all__ = ["Flat"]

__getattr__ = told_by("experimental.placement", __all__)
