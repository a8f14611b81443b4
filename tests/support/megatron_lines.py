"""Real launch lines of Megatron-LM's ``pretrain_gpt.py`` (its examples and functional tests), kept compactly.

``python -m tests.support.megatron_lines launch_lines.json`` writes them anew from a list of {name, ranks, flags}.
"""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

FIXTURE = Path(__file__).parent / "fixtures" / "megatron_lines.json"


@dataclass(frozen=True)
class LaunchLine:
    """A launch line."""

    name: str
    ranks: int | None
    """The ranks that it needs, where that is known."""

    argv: tuple[str, ...]

    @property
    def flags(self) -> set[str]:
        """The spellings of its flags."""
        return {token.partition("=")[0] for token in self.argv if token.startswith("--")}


def launch_lines() -> list[LaunchLine]:
    """Return all lines; their paths are the word PATH."""
    kept = json.loads(FIXTURE.read_text(encoding="utf-8"))
    flags = [shlex.split(text) for text in kept["flags"]]
    return [
        LaunchLine(name, ranks, tuple(token for index in indices for token in flags[index]))
        for name, ranks, indices in kept["lines"]
    ]


def compact(lines: list[dict[str, object]]) -> str:
    """Write each flag with its values once, and each line as a list of their indices."""
    index_of: dict[str, int] = {}
    rows = []
    for line in lines:
        parts: list[list[str]] = []
        for token in line["flags"]:  # type: ignore[attr-defined]
            if token.startswith("--"):
                parts.append([token])
            else:
                parts[-1].append(token)
        indices = [index_of.setdefault(shlex.join(part), len(index_of)) for part in parts]
        rows.append(json.dumps([line["name"], line["ranks"], indices], separators=(",", ":")))
    flags = ",\n".join(json.dumps(text) for text in index_of)
    body = ",\n".join(rows)
    return f'{{"flags": [\n{flags}\n],\n"lines": [\n{body}\n]}}\n'


if __name__ == "__main__":
    FIXTURE.write_text(compact(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), encoding="utf-8")
