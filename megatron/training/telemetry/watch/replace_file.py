"""The replacement of a small file that others read at any time."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, text: str) -> None:
    """Write a file so that readers see the old text or the new one, never a part.

    Raises:
        OSError: it cannot be written; the old one stays.

    Ranks: one.
    """
    # Hidden and with another suffix, so that who collects files of a folder by their names passes it over.
    beside = path.with_name(f".{path.name}.new-{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
