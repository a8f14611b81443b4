"""Where a run of another program stood when it saved a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ForeignRun:
    """Where a run of another program stood when it saved.

    Args:
        path: the checkpoint, for messages.
        args: its plain arguments, by Megatron-LM's names; {} if it saved none.
        not_plain: names of arguments that it saved and that are not plain.
        file: that of the arguments, for messages.
        has_state: whether the checkpoint has optimizer state in addition to weights.
        iteration: completed iterations; None if it does not say.
        is_release: it holds weights that were published, not the state of a run.
        schedule: its schedule of rates and the position in it, by Megatron-LM's names; {} if it saved none.
        steps: numbers of updates that its optimizer had made, one each; [] if it saved none.
        sharding: how its optimizer's state is laid out, by Megatron-LM's name; "" if it does not say.
        not_taken: what it saved that has no counterpart here, with what is in its place.
    """

    path: Path
    args: Mapping[str, Any]
    iteration: int | None
    is_release: bool
    schedule: Mapping[str, Any]
    not_plain: frozenset[str] = frozenset()
    file: Path | None = None
    has_state: bool = False
    steps: tuple[int, ...] = ()
    sharding: str = ""
    not_taken: tuple[str, ...] = ()

    @property
    def step(self) -> int | None:
        """Updates that the optimizer had made; None if it does not say.

        Raises:
            ValueError: parts of the optimizer had made different numbers of them.
        """
        if len(self.steps) > 1:
            raise ValueError(
                f"{self.path}: all parts of the optimizer must have made the same number of steps, got {list(self.steps)}; load it "
                "with --no-load-optim"
            )
        return self.steps[0] if self.steps else None
