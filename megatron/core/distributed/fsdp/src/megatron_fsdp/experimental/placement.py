"""Megatron-FSDP's import path of version 2's placements."""

from megatron.core.distributed.fsdp.src.version2 import Flat, changed_mesh_axis

__all__ = ["Flat", "changed_mesh_axis"]
