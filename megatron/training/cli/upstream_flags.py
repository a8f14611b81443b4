"""Megatron-LM's command line at 2026-08-22, from ``upstream_flags.json``, which ``tools/upstream.py`` writes."""

from __future__ import annotations

import json
from pathlib import Path
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


UPSTREAM_FLAGS: dict[str, UpstreamFlag] = {
    flag: UpstreamFlag(**{**row, "choices": tuple(row.get("choices", ()))})
    for flag, row in json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")).items()
}
