"""Megatron-FSDP's import path of its version 1; ``import_paths.py`` makes the submodules."""

from typing import TYPE_CHECKING, Any

from megatron.core import __version__
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.fsdp.adapter.distributed_index import FSDPDistributedIndex
from megatron.core.distributed.fsdp.adapter.megatron_fsdp import (
    MegatronFSDP,
    fully_shard,
    fully_shard_model,
    fully_shard_optimizer,
)
from megatron.core.distributed.fsdp.config.mixed_precision import MixedPrecisionPolicy
from megatron.core.distributed.fsdp.src.import_paths import PACKAGE_INFO, VERSION_1, make_submodules

__description__, __keywords__ = PACKAGE_INFO["__description__"], PACKAGE_INFO["__keywords__"]
__package_name__, __shortversion__ = PACKAGE_INFO["__package_name__"], PACKAGE_INFO["__shortversion__"]

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

make_submodules(__name__, VERSION_1)

if TYPE_CHECKING:  # checkers find no files of the submodules

    def __getattr__(name: str) -> Any: ...
