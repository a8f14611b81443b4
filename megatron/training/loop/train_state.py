"""Where training stands."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(kw_only=True)
class TrainState:
    """Counters that a checkpoint carries on."""

    iteration: int = 0
    """Iterations that were completed."""

    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0

    def as_dict(self) -> dict[str, int]:
        """Plain values, for a checkpoint."""
        return asdict(self)
