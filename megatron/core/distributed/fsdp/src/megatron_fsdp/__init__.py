"""Megatron-FSDP's import path of its version 1.

A submodule that has the name of a function is imported here, so that importing it later does not put it in the function's place.
"""

from megatron.core.distributed.fsdp.src.megatron_fsdp.fully_shard import (
    fully_shard,
    fully_shard_model,
    fully_shard_optimizer,
)
from megatron.core.distributed.fsdp.src.megatron_fsdp.package_info import (
    __description__,
    __keywords__,
    __package_name__,
    __shortversion__,
    __version__,
)
from megatron.core.distributed.fsdp.src.version1 import (
    DistributedDataParallelConfig,
    FSDPDistributedIndex,
    MegatronFSDP,
    MixedPrecisionPolicy,
)

__all__ = [
    "DistributedDataParallelConfig",
    "FSDPDistributedIndex",
    "MegatronFSDP",
    "MixedPrecisionPolicy",
    "__description__",
    "__keywords__",
    "__package_name__",
    "__shortversion__",
    "__version__",
    "fully_shard",
    "fully_shard_model",
    "fully_shard_optimizer",
]
