"""A reader of PyTorch's checkpoints that reads the metadata of a folder once."""

from __future__ import annotations

import os
from typing import Any, ClassVar

from torch.distributed.checkpoint import FileSystemReader, Metadata


class CachedMetadataFileSystemReader(FileSystemReader):
    """A reader whose metadata all readers of the folder share until ``clear_metadata_cache``.

    Args:
        cache_metadata: False: read it again each time.

    Source: Megatron-Core's class of this name (names).
    """

    _metadata_cache: ClassVar[dict[str, Metadata]] = {}

    def __init__(self, path: str | os.PathLike[str], cache_metadata: bool = True) -> None:
        super().__init__(path)
        self._cache_metadata = cache_metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the folder's metadata."""
        if not self._cache_metadata:
            return super().read_metadata(*args, **kwargs)
        path = os.path.realpath(self.path)
        if path not in self._metadata_cache:
            self._metadata_cache[path] = super().read_metadata(*args, **kwargs)
        return self._metadata_cache[path]

    @classmethod
    def clear_metadata_cache(cls) -> None:
        """Forget all metadata, as before a folder is read that was written again."""
        cls._metadata_cache.clear()
