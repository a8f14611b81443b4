"""Writer to Weights & Biases; the only file that imports it."""

from __future__ import annotations

from typing import Any


class WandbWriter:
    """A writer of scalars to a run of Weights & Biases."""

    def __init__(self, *, project: str, entity: str, name: str, folder: str, settings: dict[str, Any]) -> None:
        import wandb

        self._run = wandb.init(project=project, entity=entity or None, name=name, dir=folder or None, config=settings)

    def add_scalars(self, scalars: dict[str, float], iteration: int, *, samples: int | None = None) -> None:
        by_samples = {} if samples is None else {"samples vs steps": samples}
        self._run.log(by_samples | scalars, step=iteration)

    def flush(self) -> None:
        """Do nothing: the service collects what is logged."""

    def close(self) -> None:
        self._run.finish()
