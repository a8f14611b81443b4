"""Data parallelism under Megatron-Core's import paths."""

import importlib
from typing import TYPE_CHECKING, Any

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig

if TYPE_CHECKING:
    from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.distributed.fsdp import FullyShardedDataParallel

__all__ = [
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "FullyShardedDataParallel",
    "finalize_model_grads",
]

_LATER = {
    "DistributedDataParallel": "megatron.core.distributed.distributed_data_parallel",
    "FullyShardedDataParallel": "megatron.core.distributed.fsdp",
    "finalize_model_grads": "megatron.core.distributed.finalize_model_grads",
}


def __getattr__(name: str) -> Any:
    """Import the adapter on first use: only it needs Megatron's model, and the engine below this package must not."""
    if name in _LATER:
        found = getattr(importlib.import_module(_LATER[name]), name)
        globals()[name] = found  # in place of the module of the same name, which the import above has put here
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
