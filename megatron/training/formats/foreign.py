"""A checkpoint of another program, as it lies on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.core.distributed.fsdp.checkpoint import ViewReader
from megatron.training.formats.architecture import Architecture, Differences, comparable, differences
from megatron.training.formats.foreign_run import ForeignRun


@dataclass(frozen=True, kw_only=True)
class ForeignCheckpoint:
    """A checkpoint of another program.

    Args:
        path: its folder.
        kind: its format, for users.
        architecture: our settings of its model; {} where it does not say.
        views: returns a reader of our tensors of a model with these settings, and of the optimizer's state under these
            keys, unless None; raises ValueError where the checkpoint is not of such a model, or has no such state.
        num_ids: rows of its embedding, with padding.
        run: where the run stood that saved it; None: it holds weights alone.
        vocab_rows: ids that its embedding has; None: as many as ours or more, of which those beyond ours pad it.
        token_ids: entries of its ``config.json`` that name special tokens.
    """

    path: Path
    kind: str
    architecture: Architecture
    views: Callable[[Architecture, Sequence[str] | None], ViewReader] = field(repr=False)
    run: ForeignRun | None = field(default=None, repr=False)
    vocab_rows: int | None = None
    num_ids: int = 0
    token_ids: Mapping[str, Any] = field(default_factory=dict)

    def reader(
        self, architecture: Architecture, *, state_keys: Sequence[str] | None = None, finetune: bool = False
    ) -> ViewReader:
        """Return a reader of our tensors of a model with these settings.

        Args:
            state_keys: keys of the optimizer's state that is read too, with main weights; None: weights alone.
            finetune: settings without weights may be others.

        Raises:
            ValueError: the checkpoint is of another model; names what differs.
        """
        found = self.differences(architecture, finetune=finetune)
        refused, here = list(found.refused), architecture["padded_vocab_size"]
        if self.vocab_rows is not None and here < self.vocab_rows:
            refused.append(
                f"padded_vocab_size: now {here}, saved {self.vocab_rows} (give --padded-vocab-size {self.vocab_rows} or more)"
            )
        if refused:
            raise ValueError(
                f"the model must be that of the checkpoint {self.path} ({self.kind}), got {', '.join(refused)}; give the "
                f"flags of that model, which tools/checkpoint/convert.py prints, or another --load{found.way_out}"
            )
        return self.views(architecture, state_keys)

    def differences(self, architecture: Architecture, *, finetune: bool = False) -> Differences:
        """Compare its model's settings, as far as it says them, with others; see ``architecture.differences``."""
        if not self.architecture:
            return Differences([], [])
        return differences(comparable(self.architecture), comparable(architecture), finetune=finetune)

    def settings(self, **changed: Any) -> dict[str, Any]:
        """Return our settings of its model, with some changed."""
        return {**self.architecture, **changed}
