"""Names of Megatron-FSDP's version 1."""

from megatron.core import __version__
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.fsdp.adapter.megatron_fsdp import (
    MegatronFSDP,
    ShardingStrategy,
    fully_shard,
    fully_shard_model,
    fully_shard_optimizer,
)
from megatron.core.distributed.fsdp.adapter.megatron_names import ParamAndGradBuffer
from megatron.core.distributed.fsdp.adapter.uneven_dtensors import (
    gather_uneven_dtensor_to_full_tensor,
    preprocess_state_dict_for_uneven_dtensor,
    redistribute_uneven_dtensor_to_replicated,
    uneven_dtensor_to_full_tensor,
)
from megatron.core.distributed.fsdp.config.mixed_precision import MixedPrecisionPolicy
from megatron.core.distributed.fsdp.mesh.distributed_index import FSDPDistributedIndex

__all__ = [
    "DistributedDataParallelConfig",
    "FSDPDistributedIndex",
    "MegatronFSDP",
    "MixedPrecisionPolicy",
    "ParamAndGradBuffer",
    "ShardingStrategy",
    "__version__",
    "fully_shard",
    "fully_shard_model",
    "fully_shard_optimizer",
    "gather_uneven_dtensor_to_full_tensor",
    "preprocess_state_dict_for_uneven_dtensor",
    "redistribute_uneven_dtensor_to_replicated",
    "uneven_dtensor_to_full_tensor",
]
