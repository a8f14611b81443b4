"""Write the table of Megatron-LM's flags, ``megatron/training/cli/upstream_flags.py``, from a JSON file of its parser.

    python tools/upstream_flags.py flags.json

The file maps each spelling to its dest, default, type, choices and nargs, all but the choices as ``repr`` gives them.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TABLE = Path(__file__).resolve().parent.parent / "megatron/training/cli/upstream_flags.py"

_HEAD = '''"""Megatron-LM's command line at 2026-08-22, as facts; written by ``tools/upstream_flags.py``."""

from __future__ import annotations

from typing import Any, NamedTuple


class UpstreamFlag(NamedTuple):
    """A spelling of a flag, as Megatron-LM's parser has it."""

    default: Any
    """Of the setting, not of the flag: True for a flag that turns it off."""

    kind: str = ""
    """The name of the values' type; empty: text."""

    nargs: int | str | None = None
    """As argparse has it; 0: a switch."""

    choices: tuple[str, ...] = ()
    dest: str = ""
    """The setting's name, where the spelling does not give it."""


_F = UpstreamFlag

# fmt: off
UPSTREAM_FLAGS: dict[str, UpstreamFlag] = {
'''


def table_of(flags: dict[str, dict[str, Any]]) -> str:
    """Return the module's text."""
    rows = [f'    "{flag}": _F({_fields(flag, entry)}),' for flag, entry in sorted(flags.items())]
    return _HEAD + "\n".join(rows) + "\n}\n"


def _fields(flag: str, entry: dict[str, Any]) -> str:
    nargs = value_of(entry["nargs"])
    kind = "" if entry["type"] in ("None", "str") else entry["type"]
    named = {
        "kind": kind,
        "nargs": nargs,
        "choices": tuple(choice.rsplit(".", 1)[-1] for choice in entry["choices"] or ()),
        "dest": "" if entry["dest"] == flag.lstrip("-").replace("-", "_") else entry["dest"],
    }
    default = value_of(entry["default"])
    fields = [
        _text(default),
        *(f"{name}={_text(value)}" for name, value in named.items() if value not in ("", None, ())),
    ]
    return ", ".join(fields)


def value_of(text: str) -> Any:
    """Evaluate what ``repr`` gave; of a member of an enumeration, its name."""
    if text.startswith("<"):
        return text[1:].split(":")[0].split(".")[-1]
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def _text(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))}{',' if len(value) == 1 else ''})"
    return repr(value)


def main(argv: Sequence[str]) -> None:
    """Write the table."""
    (source,) = argv
    TABLE.write_text(table_of(json.loads(Path(source).read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
