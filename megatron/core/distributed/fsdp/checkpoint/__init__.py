"""Checkpoints in PyTorch's DCP format, which any number of ranks and any strategy can load.

A checkpoint is a folder with these entries:

- ``<name in the unwrapped model>``: a main weight or persistent buffer, whole, however it was split between ranks
  (data, tensor or expert parallelism, pipeline stages). Tied weights have one entry, under their first name.
- ``optimizer.state.<parameter>.<key>``: optimizer state.
- ``optimizer.param_groups``, ``optimizer.kind``: hyperparameters, by the names of the parameters that they are for.
- ``extra_state.<key>``: what the caller of ``save_checkpoint`` gave on rank 0.
- ``extra_state.per_rank.<rank>``: what each rank gave as ``extra_state["per_rank"]``.
"""

from megatron.core.distributed.fsdp.checkpoint.agreement import agree
from megatron.core.distributed.fsdp.checkpoint.files import CheckpointReader
from megatron.core.distributed.fsdp.checkpoint.load import load_checkpoint
from megatron.core.distributed.fsdp.checkpoint.save import AsyncSave, save_checkpoint
from megatron.core.distributed.fsdp.checkpoint.state import EXTRA_STATE, OPTIMIZER

__all__ = [
    "EXTRA_STATE",
    "OPTIMIZER",
    "AsyncSave",
    "CheckpointReader",
    "agree",
    "load_checkpoint",
    "save_checkpoint",
]
