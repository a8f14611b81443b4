"""A checkpoint as somebody reads it who knows nothing of the model."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load


def whole_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of the checkpoint in the folder ``path``, by PyTorch's own reader in one process."""
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is one process
        load(state, checkpoint_id=path, no_dist=True)
    return state
