"""What importing the engine brings with it."""

from __future__ import annotations

import subprocess
import sys

import megatron.core.distributed
import megatron.core.distributed.fsdp
import megatron.core.distributed.fsdp.mcore_fsdp_adapter

ENGINE_ALONE = """
import sys
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp import fully_shard, load_checkpoint, microbatch
print([name for name in sys.modules if name.startswith(("megatron.core.transformer", "megatron.core.models"))])
"""


def test_the_engine_is_imported_without_megatrons_model() -> None:
    """Library code that brings a model of its own does not pay for Megatron's, nor fail where that cannot be imported."""
    done = subprocess.run([sys.executable, "-c", ENGINE_ALONE], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_adapter_is_found_where_megatrons_users_look() -> None:
    adapter = megatron.core.distributed.fsdp.mcore_fsdp_adapter.FullyShardedDataParallel
    assert megatron.core.distributed.FullyShardedDataParallel is adapter
    assert megatron.core.distributed.fsdp.FullyShardedDataParallel is adapter
