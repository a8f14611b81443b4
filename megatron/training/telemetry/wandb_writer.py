"""Writer to Weights & Biases; the only file that imports it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any


def require_wandb() -> None:
    """Check that the package is installed.

    Raises:
        ValueError: it is not.
    """
    if find_spec("wandb") is None:
        raise ValueError("--wandb-project needs the package wandb, which is not installed: pip install wandb")


class WandbWriter:
    """A writer of scalars to a run of Weights & Biases."""

    def __init__(self, *, project: str, entity: str, name: str, folder: str, settings: dict[str, Any]) -> None:
        import wandb

        self._run = wandb.init(project=project, entity=entity or None, name=name, dir=folder or None, config=settings)

    def add_scalars(self, scalars: dict[str, float], iteration: int) -> None:
        self._run.log(scalars, step=iteration)

    def close(self) -> None:
        self._run.finish()
