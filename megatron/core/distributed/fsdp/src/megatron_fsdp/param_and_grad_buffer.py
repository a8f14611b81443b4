"""Megatron-FSDP's import path of its buffers."""

from megatron.core.distributed.fsdp.src.elsewhere import told_by
from megatron.core.distributed.fsdp.src.version1 import (
    ParamAndGradBuffer,
    to_local_if_dtensor,
)

__all__ = ["ParamAndGradBuffer", "to_local_if_dtensor"]

__getattr__ = told_by("param_and_grad_buffer", __all__)
