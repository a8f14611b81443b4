"""Megatron-FSDP's import path of its wrapper."""

from megatron.core.distributed.fsdp.src.elsewhere import told_by
from megatron.core.distributed.fsdp.src.version1 import (
    MegatronFSDP,
)

__all__ = ["MegatronFSDP"]

__getattr__ = told_by("megatron_fsdp", __all__)
