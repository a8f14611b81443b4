"""Checkpoints of sharded state dicts, under Megatron-Core's names.

``save_checkpoint`` and ``load_checkpoint`` of ``megatron.core.distributed.fsdp`` need no sharded state dict: the placements of a
sharded model say the same.
"""

from megatron.core.dist_checkpointing.core import check_is_distributed_checkpoint
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.serialization import (
    load,
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_tensors_metadata,
    save,
)

__all__ = [
    "LocalNonpersistentObject",
    "ShardedObject",
    "ShardedTensor",
    "check_is_distributed_checkpoint",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_tensors_metadata",
    "save",
]
