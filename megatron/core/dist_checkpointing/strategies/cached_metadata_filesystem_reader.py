"""Megatron-Core's import path of a reader that reads a checkpoint's metadata once."""

from megatron.core.elsewhere import elsewhere

CachedMetadataFileSystemReader = elsewhere(
    __name__, "CachedMetadataFileSystemReader", "torch.distributed.checkpoint.FileSystemReader reads the same folders"
)

__all__ = ["CachedMetadataFileSystemReader"]
