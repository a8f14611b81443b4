"""Names of Megatron-FSDP's version 2."""

from megatron.core.distributed.fsdp.adapter.megatron_fsdp_v2 import (
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    load_checkpoint,
    microbatch,
    save_checkpoint,
)
from megatron.core.distributed.fsdp.buffers.parameter_group import group_of
from megatron.core.distributed.fsdp.compat.chunk_packing import GlobalLayout, non_leading_numel
from megatron.core.distributed.fsdp.compat.context import IndexedOrder
from megatron.core.distributed.fsdp.compat.context import MegatronContext as FsdpContext
from megatron.core.distributed.fsdp.compat.dbuffer import DBuffer, Flat, changed_mesh_axis
from megatron.core.distributed.fsdp.compat.parameter_group import FsdpParameter, sync_model_weights_from_main_weights
from megatron.core.distributed.fsdp.compat.parameter_group import MegatronParameterGroup as FsdpParameterGroup
from megatron.core.distributed.fsdp.config.mixed_precision import MixedPrecisionPolicy
from megatron.core.distributed.fsdp.config.placement import Placements
from megatron.core.distributed.fsdp.fsdp2.methods import FSDPModule as FsdpModule

get_containing_parameter_group = group_of

__all__ = [
    "DBuffer",
    "Flat",
    "FsdpContext",
    "FsdpModule",
    "FsdpParameter",
    "FsdpParameterGroup",
    "GlobalLayout",
    "IndexedOrder",
    "MixedPrecisionPolicy",
    "Placements",
    "changed_mesh_axis",
    "fully_shard",
    "fully_shard_context",
    "fully_shard_optimizer",
    "get_containing_parameter_group",
    "load_checkpoint",
    "microbatch",
    "non_leading_numel",
    "save_checkpoint",
    "sync_model_weights_from_main_weights",
]
