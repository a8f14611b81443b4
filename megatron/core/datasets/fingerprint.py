"""Short descriptions of files, by which ranks notice that they read different ones."""

from __future__ import annotations

import hashlib
import os
import zlib
from pathlib import Path

_NUM_SAMPLES = 16
_SAMPLE_NBYTES = 4096
_CHUNK_NBYTES = 1 << 22


def corpus_fingerprint(prefix: str) -> str:
    """Describe ``<prefix>.idx`` by its size and a checksum, and ``<prefix>.bin`` by its size and a hash of samples.

    Ranks: each alone; reads the ``.idx``, and 64 KiB of the ``.bin``, whatever its size.
    Source: ours.
    """
    return f"({path_fingerprint(f'{prefix}.idx')}{_checksum(f'{prefix}.idx')}, {path_fingerprint(f'{prefix}.bin')})"


def path_fingerprint(path: str) -> str:
    """Describe a file, or the files of a folder: the size, and a hash of samples of the bytes.

    If a file cannot be read, return the error as the description; the code that reads the data raises it later.
    """
    try:
        return _description(Path(path))
    except OSError as error:
        return f"a {Path(path).suffix or 'file'} that cannot be read ({error.strerror})"


def _description(root: Path) -> str:
    if not root.is_dir() and not root.is_file():
        return f"no {root.suffix or 'file'}"
    files = sorted(entry for entry in root.iterdir() if entry.is_file()) if root.is_dir() else [root]
    digest, nbytes = hashlib.sha256(), 0
    for file in files:
        size = file.stat().st_size
        nbytes += size
        digest.update(f"{file.name if root.is_dir() else ''} {size}".encode())
        _add_samples(file, size, digest)
    return f"{root.suffix or 'files'} of {nbytes} bytes, {digest.hexdigest()[:12]}"


def _checksum(path: str) -> str:
    """Return the checksum of a whole file as text; empty if the file is missing or cannot be read."""
    checksum = 0
    if not os.path.isfile(path):
        return ""
    try:
        with open(path, "rb", buffering=0) as file:
            while chunk := file.read(_CHUNK_NBYTES):
                checksum = zlib.crc32(chunk, checksum)
    except OSError:
        return ""
    return f", CRC {checksum:08x}"


def _add_samples(file: Path, size: int, digest: hashlib._Hash) -> None:
    """Add evenly spaced samples of a file to the digest, the first and the last bytes among them; all of a small file."""
    last = max(size - _SAMPLE_NBYTES, 0)
    with open(file, "rb", buffering=0) as opened:
        for start in sorted({last * sample // (_NUM_SAMPLES - 1) for sample in range(_NUM_SAMPLES)}):
            digest.update(os.pread(opened.fileno(), _SAMPLE_NBYTES, start))
