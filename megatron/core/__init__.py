"""Model, data and distribution code under the import paths that Megatron-Core users know."""

from __future__ import annotations

import importlib
from typing import Any

from megatron.core import import_paths

__version__ = "0.2.0"

# Names of Megatron-Core's package, each with its module; what is imported here is imported when it is asked for.
_LATER = {
    "DistributedDataParallel": "megatron.core.distributed.distributed_data_parallel",
    "ModelParallelConfig": "megatron.core.model_parallel_config",
    "Timers": "megatron.core.timers",
}


def __getattr__(name: str) -> Any:
    if name == "mpu":
        return importlib.import_module("megatron.core.parallel_state")
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


import_paths.install()
