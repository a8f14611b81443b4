"""Tell from what lies in a folder which program's checkpoint it is."""

from __future__ import annotations

from pathlib import Path

from megatron.training.formats.foreign import ForeignCheckpoint
from megatron.training.formats.huggingface import CONFIG, open_huggingface


def find_foreign(folder: Path, step: int | None = None) -> ForeignCheckpoint | None:
    """Return another program's checkpoint in a folder; None where there is none, or one of ours.

    Args:
        step: the iteration to load; None: the latest.

    Raises:
        NotImplementedError: it is one, but not served; says why.
        ValueError, FileNotFoundError: it is one, but damaged or incomplete.
    """
    if (folder / CONFIG).is_file():
        return open_huggingface(folder)
    return None
