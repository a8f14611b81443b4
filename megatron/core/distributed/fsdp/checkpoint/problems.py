"""The differences between a checkpoint and what it is loaded into, reported together and by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_MAX_NAMED = 20


@dataclass
class Problems:
    """The differences of one part, the model or the optimizer. True if there are any.

    Args:
        missing: names that the checkpoint lacks.
        extra: names that only the checkpoint has.
        misshaped: names with both shapes.
        mistyped: names with both dtypes, or of plain values in place of tensors.
        other: sentences.
        is_partial: this rank holds a part of the model, so that another rank may have what is ``extra`` here.
    """

    part: str
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    misshaped: list[str] = field(default_factory=list)
    mistyped: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)
    is_partial: bool = False

    def __bool__(self) -> bool:
        return bool(self.missing or self._own_extra or self.misshaped or self.mistyped or self.other)

    @property
    def _own_extra(self) -> list[str]:
        return [] if self.is_partial else self.extra

    def __str__(self) -> str:
        kinds = (
            ("missing in the checkpoint", self.missing),
            (f"in the checkpoint, but not in the {self.part}", self._own_extra),
            ("of another shape", self.misshaped),
            ("of another kind", self.mistyped),
            ("also", self.other),
        )
        return f"{self.part}: " + "; ".join(f"{kind}: {_listed(names)}" for kind, names in kinds if names)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMED])
    more = f", ... ({len(names)} in all)" if len(names) > _MAX_NAMED else f" ({len(names)})"
    return shown + more
