"""Names of Megatron-FSDP's version 1."""

from megatron.core import __version__
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.fsdp.adapter.distributed_index import FSDPDistributedIndex
from megatron.core.distributed.fsdp.adapter.megatron_fsdp import (
    MegatronFSDP,
    ShardingStrategy,
    fully_shard,
    fully_shard_model,
    fully_shard_optimizer,
)
from megatron.core.distributed.fsdp.adapter.megatron_names import ParamAndGradBuffer
from megatron.core.distributed.fsdp.adapter.parallel_attributes import (
    contains_submesh,
    find_megatron_fsdp,
    get_mcore_tensor_parallel_partition_dim,
    get_mesh_names,
    is_mcore_tensor_model_parallel,
    is_mcore_tensor_parallel_duplicated,
    is_submodule,
    safe_get_rank,
    using_tensor_parallel,
)
from megatron.core.distributed.fsdp.adapter.uneven_dtensors import (
    filter_unflattened_state_dict,
    gather_and_compute_chunk_metadata,
    gather_uneven_dtensor_to_full_tensor,
    get_unflattened_state_dict,
    preprocess_state_dict_for_uneven_dtensor,
    redistribute_uneven_dtensor_to_replicated,
    split_dtensor,
    uneven_dtensor_to_full_tensor,
    update_uneven_dtensor_chunk_metadata,
    validate_uneven_dtensor,
)
from megatron.core.distributed.fsdp.config.mixed_precision import MixedPrecisionPolicy
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.utils import (
    get_te_version,
    is_te_min_version,
    is_torch_min_version,
    log_single_rank,
    to_local_if_dtensor,
)

__all__ = [
    "DistributedDataParallelConfig",
    "FSDPDistributedIndex",
    "MegatronFSDP",
    "MixedPrecisionPolicy",
    "ParamAndGradBuffer",
    "ShardingStrategy",
    "__version__",
    "contains_submesh",
    "filter_unflattened_state_dict",
    "find_megatron_fsdp",
    "fully_shard",
    "fully_shard_model",
    "fully_shard_optimizer",
    "gather_and_compute_chunk_metadata",
    "gather_uneven_dtensor_to_full_tensor",
    "get_cuda_rng_tracker",
    "get_mcore_tensor_parallel_partition_dim",
    "get_mesh_names",
    "get_te_version",
    "get_unflattened_state_dict",
    "is_mcore_tensor_model_parallel",
    "is_mcore_tensor_parallel_duplicated",
    "is_submodule",
    "is_te_min_version",
    "is_torch_min_version",
    "log_single_rank",
    "preprocess_state_dict_for_uneven_dtensor",
    "redistribute_uneven_dtensor_to_replicated",
    "safe_get_rank",
    "split_dtensor",
    "to_local_if_dtensor",
    "uneven_dtensor_to_full_tensor",
    "update_uneven_dtensor_chunk_metadata",
    "using_tensor_parallel",
    "validate_uneven_dtensor",
]
