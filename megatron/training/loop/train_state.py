"""The counters of training."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(kw_only=True)
class TrainState:
    """Counters of training, saved in checkpoints."""

    iteration: int = 0
    """Number of completed iterations."""

    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0

    def as_dict(self) -> dict[str, int]:
        """Return the counters by name, for a checkpoint."""
        return asdict(self)
