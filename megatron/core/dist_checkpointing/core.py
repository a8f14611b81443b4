"""What makes a folder a distributed checkpoint of Megatron-Core: ``metadata.json`` beside DCP's files."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.core.regular_file import read_json

CONFIG_FNAME = "metadata.json"
BACKEND, VERSION = "torch_dist", 1


class CheckpointingException(Exception):
    """A sharded state dict, or a checkpoint, is not what it must be."""


@dataclass
class CheckpointingConfig:
    """The format of a checkpoint's sharded tensors, and its version."""

    sharded_backend: str
    sharded_backend_version: int = VERSION


def maybe_load_config(checkpoint_dir: str | os.PathLike[str]) -> CheckpointingConfig | None:
    """Return the format of a checkpoint; None where the folder is none. Raises CheckpointingException for a damaged one."""
    path = Path(checkpoint_dir) / CONFIG_FNAME
    if not str(checkpoint_dir) or not path.is_file():
        return None
    try:
        found = read_json(path)
        backend, version = found["sharded_backend"], found.get("sharded_backend_version", VERSION)
        if type(backend) is not str or type(version) is not int:
            raise TypeError(f"{backend!r}, version {version!r}")
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise CheckpointingException(
            f"{path} must name the format of a checkpoint, got {type(error).__name__}: {str(error)[:400]}; it is damaged, load another "
            "checkpoint"
        ) from error
    return CheckpointingConfig(backend, version)


def encode_config(config: CheckpointingConfig) -> bytes:
    """Return the format of a checkpoint as the text of its file."""
    return json.dumps(asdict(config)).encode()


def save_config(config: CheckpointingConfig, checkpoint_dir: str | os.PathLike[str]) -> None:
    """Write the format of a checkpoint. Ranks: one."""
    (Path(checkpoint_dir) / CONFIG_FNAME).write_bytes(encode_config(config))


def check_is_distributed_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> bool:
    """Return whether a folder is a distributed checkpoint."""
    return maybe_load_config(checkpoint_dir) is not None
