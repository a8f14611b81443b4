"""Megatron-FSDP's import path of version 2's checkpoints."""

from megatron.core.distributed.fsdp.src.version2 import load_checkpoint, save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]
