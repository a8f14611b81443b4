"""Short descriptions of files, by which ranks notice that they read different ones."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_NUM_SAMPLES = 16
_SAMPLE_NBYTES = 4096


def corpus_fingerprint(prefix: str) -> str:
    """Describe ``<prefix>.idx`` and ``<prefix>.bin``: their sizes, and a hash of samples of their bytes.

    Ranks: each alone; reads at most 128 KiB, whatever the size of the files.
    Source: ours.
    """
    return f"({path_fingerprint(f'{prefix}.idx')}, {path_fingerprint(f'{prefix}.bin')})"


def path_fingerprint(path: str) -> str:
    """Describe a file, or the files of a folder: the size, and a hash of samples of the bytes."""
    root = Path(path)
    if not root.exists():
        return f"no {root.suffix or 'file'}"
    files = sorted(entry for entry in root.iterdir() if entry.is_file()) if root.is_dir() else [root]
    digest, nbytes = hashlib.sha256(), 0
    for file in files:
        size = file.stat().st_size
        nbytes += size
        digest.update(f"{file.name if root.is_dir() else ''} {size}".encode())
        _add_samples(file, size, digest)
    return f"{root.suffix or 'files'} of {nbytes} bytes, {digest.hexdigest()[:12]}"


def _add_samples(file: Path, size: int, digest: hashlib._Hash) -> None:
    """Add evenly spaced samples of a file to the digest, the first and the last bytes among them; all of a small file."""
    last = max(size - _SAMPLE_NBYTES, 0)
    with open(file, "rb", buffering=0) as opened:
        for start in sorted({last * sample // (_NUM_SAMPLES - 1) for sample in range(_NUM_SAMPLES)}):
            digest.update(os.pread(opened.fileno(), _SAMPLE_NBYTES, start))
