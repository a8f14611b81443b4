"""Changes of files, drawn at random: what disks, copies, scripts and attackers do to them."""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

Change = Callable[[bytes, random.Random], bytes]


def _flipped(content: bytes, draw: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 8))):
        bit = draw.randrange(8 * len(changed))
        changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def _overwritten(content: bytes, draw: random.Random) -> bytes:
    start, length = draw.randrange(len(content)), draw.choice((1, 2, 4, 8, 64, 512))
    noise = draw.choice((bytes(length), b"\xff" * length, draw.randbytes(length)))
    return (content[:start] + noise + content[start + length :])[: len(content)]


def _cut(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.choice((0, 1, len(content) // 2, len(content) - 1, draw.randrange(len(content))))]


def _longer(content: bytes, draw: random.Random) -> bytes:
    return content + draw.choice((b"\0", b"\n", bytes(512), content[-8:], content))


def _moved(content: bytes, draw: random.Random) -> bytes:
    """Exchange two ranges of equal length, as a torn write does."""
    length = draw.choice((1, 4, 8, 64))
    first, second = (draw.randrange(max(1, len(content) - length)) for _ in range(2))
    changed = bytearray(content)
    changed[first : first + length], changed[second : second + length] = (
        content[second : second + length],
        content[first : first + length],
    )
    return bytes(changed)


def _missing(content: bytes, draw: random.Random) -> bytes:
    start = draw.randrange(len(content))
    return content[:start] + content[start + draw.choice((1, 4, 8, 512)) :]


CHANGES: dict[str, Change] = {
    "flipped": _flipped,
    "overwritten": _overwritten,
    "cut": _cut,
    "longer": _longer,
    "moved": _moved,
    "a range is missing": _missing,
}


def change_file(path: Path, other: Path, draw: random.Random) -> str:
    """Change a file, remove it or put another one of its kind in its place; return what was done."""
    kind = draw.choice((*CHANGES, "removed", "exchanged"))
    if kind == "removed":
        path.unlink()
    elif kind == "exchanged":
        path.write_bytes(other.read_bytes())
    else:
        path.write_bytes(CHANGES[kind](path.read_bytes(), draw))
    return kind


def run_often(description: str | None, trials: int, mutate_often: Callable[..., tuple[Counter[str], list[str]]]) -> int:
    """Serve the command line of a script: damage as often as it asks, print the counts, and return the exit status."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=trials)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    outcomes, faults = mutate_often(arguments.trials, seed=arguments.seed)
    for name, count in sorted(outcomes.items()):
        print(f"{count:6} {name}")
    print(*faults, f"{len(faults)} faults", sep="\n")
    return 1 if faults else 0
