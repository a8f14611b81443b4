"""Fully sharded data parallelism: start with ``fully_shard``; DESIGN.md and SCHEDULE.md explain how it works.

Code outside of this package imports from here, and from ``checkpoint`` what reads checkpoints without a model.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron.core.distributed.fsdp.config import torch_versions as _torch_versions  # noqa: F401 (checks the version first)

# isort: split
from megatron.core.distributed.fsdp import codec as _codec  # noqa: F401 (registers itself)
from megatron.core.distributed.fsdp import foreign_optimizers as _foreign_optimizers  # noqa: F401 (registers itself)
from megatron.core.distributed.fsdp.api.module import contexts_of, microbatch
from megatron.core.distributed.fsdp.api.optimizer import fully_shard_optimizer
from megatron.core.distributed.fsdp.buffers.grad_sums import sum_grads
from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup, group_of
from megatron.core.distributed.fsdp.checkpoint import load_checkpoint, save_checkpoint
from megatron.core.distributed.fsdp.checkpoint.optimizer import make_initial_state
from megatron.core.distributed.fsdp.codec.fp8_codec import Fp8Codec
from megatron.core.distributed.fsdp.codec.scaling import Fp8Wrapper
from megatron.core.distributed.fsdp.comm.choose import TRANSPORT_KINDS, TransportKind
from megatron.core.distributed.fsdp.comm.peer_memory import peer_memory_nbytes
from megatron.core.distributed.fsdp.compat.dbuffer import DBuffer
from megatron.core.distributed.fsdp.compat.module import MegatronFsdpPolicy
from megatron.core.distributed.fsdp.config.mixed_precision import MixedPrecisionPolicy
from megatron.core.distributed.fsdp.config.placement import Placements, hybrid_placements
from megatron.core.distributed.fsdp.flat_optimizer.flat_adamw import FlatAdamW
from megatron.core.distributed.fsdp.flat_optimizer.flat_muon import FlatMuon
from megatron.core.distributed.fsdp.flat_optimizer.flat_norm import NormScope, counts_in_norm, norm_scope_of
from megatron.core.distributed.fsdp.fsdp2.fully_shard import fully_shard, fully_shard_context
from megatron.core.distributed.fsdp.fsdp2.methods import FSDPModule as FsdpModule
from megatron.core.distributed.fsdp.layout.granule import Granule
from megatron.core.distributed.fsdp.matrices.newton_schulz import newton_schulz_coefficients
from megatron.core.distributed.fsdp.matrices.replayed_work import no_garbage_collection
from megatron.core.distributed.fsdp.mesh.model_parallel import ModelParallel
from megatron.core.distributed.fsdp.runtime.context import FsdpContext
from megatron.core.distributed.fsdp.self_audit import AuditReport, audit

if TYPE_CHECKING:
    from megatron.core.distributed.fsdp.adapter.distributed_index import FSDPDistributedIndex
    from megatron.core.distributed.fsdp.adapter.fully_sharded_data_parallel import FullyShardedDataParallel
    from megatron.core.distributed.fsdp.adapter.model_chunks import ModelChunks

__all__ = [
    "TRANSPORT_KINDS",
    "AuditReport",
    "DBuffer",
    "FSDPDistributedIndex",
    "FlatAdamW",
    "FlatMuon",
    "Fp8Codec",
    "Fp8Wrapper",
    "FsdpContext",
    "FsdpModule",
    "FsdpParameterGroup",
    "FullyShardedDataParallel",
    "Granule",
    "MegatronFsdpPolicy",
    "MixedPrecisionPolicy",
    "ModelChunks",
    "ModelParallel",
    "NormScope",
    "Placements",
    "TransportKind",
    "audit",
    "contexts_of",
    "counts_in_norm",
    "fully_shard",
    "fully_shard_context",
    "fully_shard_optimizer",
    "group_of",
    "hybrid_placements",
    "load_checkpoint",
    "make_initial_state",
    "microbatch",
    "newton_schulz_coefficients",
    "no_garbage_collection",
    "norm_scope_of",
    "peer_memory_nbytes",
    "save_checkpoint",
    "sum_grads",
]

# By name, the module of the adapter. It needs Megatron's model, which ``fully_shard`` does without: the engine's wheel has no adapter.
_OF_ADAPTER = {
    "FSDPDistributedIndex": "distributed_index",
    "FullyShardedDataParallel": "fully_sharded_data_parallel",
    "ModelChunks": "model_chunks",
}


def __getattr__(name: str) -> Any:
    """Import a name of the adapter on first use."""
    if name not in _OF_ADAPTER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.adapter.{_OF_ADAPTER[name]}"), name)
