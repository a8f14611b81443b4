"""Tell from what lies in a folder which program's checkpoint it is."""

from __future__ import annotations

from pathlib import Path

from megatron.core.distributed.fsdp.checkpoint import EXTRA_STATE, CheckpointReader, is_complete
from megatron.core.regular_file import is_regular, read_regular
from megatron.training.formats.foreign import ForeignCheckpoint
from megatron.training.formats.huggingface import open_huggingface
from megatron.training.formats.huggingface_config import CONFIG
from megatron.training.formats.megatron_lm import RANK_FOLDER, open_distributed, open_legacy

TRACKER, RELEASE = "latest_checkpointed_iteration.txt", "release"


def find_foreign(folder: Path, step: int | None = None, *, verify: bool = True) -> ForeignCheckpoint | None:
    """Return another program's checkpoint in a folder; None where there is none, or one of ours.

    Args:
        folder: of a model, of a run with its tracker, or of one iteration.
        step: the iteration to load; None: the latest.
        verify: compare what is read with its checksums, where there are any.

    Raises:
        NotImplementedError: it is one, but not served; says why.
        ValueError, FileNotFoundError: it is one, but damaged or incomplete.
    """
    if is_regular(folder / CONFIG):
        return open_huggingface(folder, verify=verify)
    path = folder_of_iteration(folder, step)
    if path == folder and any(folder.glob("*.safetensors")):
        raise FileNotFoundError(
            f"{folder} must have a {CONFIG} next to its safetensors files, got none; download or copy the folder again"
        )
    if any(path.glob(RANK_FOLDER)):
        return open_legacy(path, verify=verify)
    if is_complete(path) and not _is_ours(path):
        return open_distributed(path, verify=verify)
    return None


def is_foreign(folder: Path) -> bool:
    """Return whether the latest checkpoint in a folder is another program's; False for a damaged one of ours."""
    try:
        return find_foreign(folder) is not None
    except NotImplementedError:
        return True
    except (ValueError, OSError):
        return False


def folder_of_iteration(folder: Path, step: int | None) -> Path:
    """Return the folder of an iteration by Megatron-LM's rules, or the folder itself where it has no tracker."""
    if step is not None:
        return folder / f"iter_{step:07d}"
    tracker = folder / TRACKER
    text = read_regular(tracker).strip() if is_regular(tracker) else b""
    if text == RELEASE.encode():
        return folder / RELEASE
    return folder / f"iter_{int(text):07d}" if text.isdigit() and len(text) < 16 else folder


def _is_ours(path: Path) -> bool:
    return f"{EXTRA_STATE}architecture" in CheckpointReader(path, verify=False).entries
