"""A temporary folder for several ranks."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def shared_folder() -> Iterator[str]:
    """A folder of all ranks, gone afterwards. Ranks: all."""
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    try:
        yield names[0]
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(names[0])
