"""The memory that indices take, and whether this host has it.

An order of samples that was shuffled as a whole, as Megatron-LM's, can only be computed as a whole. So an index must fit
into memory while it is built; afterwards it is mapped from its files, where it has a folder.
"""

from __future__ import annotations

import os
from pathlib import Path

MOCK_TOKENS = 2048
"""Of a document of the mock data, about."""

DOCUMENT_NBYTES = 4
"""Of a document in an epoch, in the document index."""

BLEND_NBYTES = 14
"""Of a sample of a blend: its corpus (twice while it is chosen) and its place there."""

_INT32_MAX = 2**31 - 1
_UINT32_MAX = 2**32 - 1
_CGROUP = Path("/sys/fs/cgroup")
_GIB = 2**30


def sample_nbytes(num_samples: int, num_documents: int = 0) -> int:
    """Return the bytes of one sample in the sample and shuffle indices.

    Args:
        num_documents: over all epochs.
    """
    start = 8 if num_documents <= _INT32_MAX else 16
    return start + (4 if num_samples < _UINT32_MAX - 1 else 8)


def index_nbytes(num_samples: int, num_documents: int) -> int:
    """Return the bytes of the index of a corpus; ``num_documents`` is over all epochs."""
    return num_documents * DOCUMENT_NBYTES + num_samples * sample_nbytes(num_samples, num_documents)


def in_gib(nbytes: float) -> str:
    """Format bytes, in GiB."""
    return f"{nbytes / _GIB:,.1f} GiB"


def available_memory() -> int | None:
    """Return the bytes of memory that a process can still take on this host, within its control group; None: unknown."""
    found = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except OSError:
        pass
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            # What is cached of files is given up for a process that needs it.
            statistics = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
            used = int((_CGROUP / "memory.current").read_text()) - int(statistics.get("inactive_file", 0))
            found.append(max(0, int(limit) - used))
    except (OSError, ValueError):
        pass
    return min(found, default=None)


def check_index_fits(what: str, nbytes: int, *, is_shared: bool) -> None:
    """Check that this host has the memory in which an index is built.

    Args:
        what: the index, in words.
        is_shared: one rank of the host builds it and the others map its files; otherwise each rank has its own.

    Raises:
        ValueError: it has not.

    Ranks: pure, but for the look at the memory.
    """
    copies = 1 if is_shared else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    available = available_memory()
    if available is None or nbytes * copies <= available:
        return
    needed = in_gib(nbytes) if copies == 1 else f"{in_gib(nbytes)} for each of {copies} ranks of this host"
    remedy = (
        "" if is_shared else "; with a folder for the index (path_to_cache, --data-cache-path) there is one for all"
    )
    raise ValueError(
        f"{what}, takes memory: {needed}, got {in_gib(available)}; ask for fewer samples "
        f"(--train-samples, or --train-iters times --global-batch-size), or use a host with more memory{remedy}"
    )
