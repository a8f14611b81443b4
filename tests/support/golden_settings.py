"""The settings and notices of real launch lines, in a text file whose diff names what changed and for which lines.

``python -m tests.support.golden_settings`` writes the file from what the command line gives now.

The file numbers the launch lines. Each setting follows with its values, and each value with the lines that have it; ``*`` stands for
all lines that no other value names. Notices and faults come last, with the lines that get them.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from itertools import groupby
from pathlib import Path
from typing import Any

from megatron.training.arguments import Settings, check_command_line, parse_settings
from megatron.training.cli.flag_parser import FlagError
from tests.support.megatron_lines import LaunchLine, launch_lines

GOLDEN = Path(__file__).parent / "fixtures" / "launch_line_settings.txt"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_NOT_SETTINGS = ("launch_line", "said_once")

Parse = Callable[[LaunchLine, int], Settings]
"""(line, ranks) -> settings; raises FlagError."""


def ranks_of(line: LaunchLine) -> int:
    """Return the ranks that a line needs, or the number among some that it fits best."""
    for ranks in [line.ranks] if line.ranks else [8, 16, 64, 256]:
        if not any("ranks" in fault for fault in check_command_line(line.argv, world_size=ranks).faults):
            break
    return ranks


def by_command_line(line: LaunchLine, ranks: int) -> Settings:
    """Return the settings that ``pretrain_gpt.py`` trains with."""
    return parse_settings(line.argv, world_size=ranks)


def golden_text(parse: Parse) -> str:
    """Return the file's text as a way to parse launch lines gives it now."""
    rows: list[str] = []
    values: dict[str, dict[str, list[int]]] = {}
    notices: dict[str, list[int]] = {}
    for number, line in enumerate(launch_lines()):
        ranks = ranks_of(line)
        rows.append(f"{number} {line.name} on {ranks} ranks")
        try:
            settings = parse(line, ranks)
        except FlagError as error:
            said = [f"fault: {text}" for text in str(error).splitlines()]
        else:
            said = [f"notice: {text}" for text in settings.said_once.lines]
            for name, value in flat(settings):
                values.setdefault(name, {}).setdefault(value, []).append(number)
        for text in said:
            notices.setdefault(text, []).append(number)
    for name in sorted(values):
        (usual, _), *others = sorted(values[name].items(), key=lambda item: (-len(item[1]), item[0]))
        rows += [f"{name} = {usual} @ *", *(f"{name} = {value} @ {_ranges(numbers)}" for value, numbers in others)]
    rows += [f"{text} @ {_ranges(notices[text])}" for text in sorted(notices)]
    return "\n".join(rows) + "\n"


def changes(text: str) -> str:
    """Return the difference from the file, empty if there is none."""
    golden = GOLDEN.read_text(encoding="utf-8")
    return "\n".join(difflib.unified_diff(golden.splitlines(), text.splitlines(), "golden", "now", n=0, lineterm=""))


def flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the name of each setting with its value as text; the notices and the words themselves are left out."""
    if dataclasses.is_dataclass(value) and not callable(value):
        for field in dataclasses.fields(value):
            if field.name not in _NOT_SETTINGS:
                yield from flat(getattr(value, field.name), f"{name}.{field.name}".lstrip("."))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from flat(item, f"{name}[{key}]")
    else:
        yield name, value.name if isinstance(value, Enum) else _ADDRESS.sub("", repr(value))


def _ranges(numbers: Iterable[int]) -> str:
    """Write ascending numbers as ``1 4-6 9``."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), key=lambda item: item[1] - item[0])]
    return " ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


if __name__ == "__main__":
    GOLDEN.write_text(golden_text(by_command_line), encoding="utf-8")
