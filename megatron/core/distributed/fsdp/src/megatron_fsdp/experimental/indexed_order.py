"""Megatron-FSDP's import path of version 2's order of modules."""

from megatron.core.distributed.fsdp.compat.elsewhere import told_by

__all__ = []

__getattr__ = told_by("experimental.indexed_order", __all__)
