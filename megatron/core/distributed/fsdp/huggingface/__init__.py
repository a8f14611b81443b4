"""Models of ``transformers`` in the engine: sharded by layers, loaded from and saved to Hugging Face folders.

``transformers`` is imported when a function is called that needs it; the files are read and written without it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from megatron.core.distributed.fsdp.huggingface.conversion import tokenizer_class
from megatron.core.distributed.fsdp.huggingface.load import LoadReport, load_pretrained
from megatron.core.distributed.fsdp.huggingface.safetensors_files import (
    CHECKSUMS,
    INDEX,
    SINGLE,
    SafetensorsWriter,
    lay_out,
    open_folder,
    read_header,
    read_json,
    write_checksums,
    write_index,
)
from megatron.core.distributed.fsdp.huggingface.save import save_pretrained
from megatron.core.distributed.fsdp.huggingface.shard import fully_shard_pretrained

if TYPE_CHECKING:
    from megatron.core.distributed.fsdp.huggingface.accelerator import FullyShardedAccelerator
    from megatron.core.distributed.fsdp.huggingface.trainer import FullyShardedTrainer

__all__ = [
    "CHECKSUMS",
    "INDEX",
    "SINGLE",
    "FullyShardedAccelerator",
    "FullyShardedTrainer",
    "LoadReport",
    "SafetensorsWriter",
    "fully_shard_pretrained",
    "lay_out",
    "load_pretrained",
    "open_folder",
    "read_header",
    "read_json",
    "save_pretrained",
    "tokenizer_class",
    "write_checksums",
    "write_index",
]

_ON_FIRST_USE = {"FullyShardedAccelerator": "accelerator", "FullyShardedTrainer": "trainer"}


def __getattr__(name: str) -> Any:
    """Import trainers on first use: their base classes are of ``transformers`` and ``accelerate``."""
    if name in _ON_FIRST_USE:
        return getattr(importlib.import_module(f"{__name__}.{_ON_FIRST_USE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
