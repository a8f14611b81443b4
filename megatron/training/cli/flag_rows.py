"""Rows of flags in effect: a row has a flag's help, and what differs from Megatron-LM's parser; all else is taken from there."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.training.cli.upstream_flags import UPSTREAM_FLAGS

_KINDS = {"int": int, "float": float}


@dataclass(frozen=True)
class Flag:
    """A flag in effect."""

    spellings: tuple[str, ...]
    help: str
    differs: Mapping[str, Any]
    """Arguments of ``add_argument`` that differ from Megatron-LM's flag of the first spelling."""

    @property
    def dest(self) -> str:
        """The name of the argument."""
        dest: str = self.facts().get("dest") or self.spellings[0].removeprefix("--").replace("-", "_")
        return dest

    def facts(self) -> dict[str, Any]:
        """Return the arguments of ``add_argument``. A flag of ours is a switch unless its row says otherwise."""
        upstream = UPSTREAM_FLAGS.get(self.spellings[0])
        if upstream is not None:
            facts: dict[str, Any] = {"nargs": upstream.nargs, "default": upstream.default}
            facts |= {"choices": upstream.choices} if upstream.choices else {}
            facts |= {"dest": upstream.dest} if upstream.dest else {}
            facts |= {"type": _KINDS[upstream.kind]} if upstream.kind in _KINDS else {}
        else:
            is_switch = not self.differs.keys() & {"type", "choices", "nargs"}
            facts = {"nargs": 0, "default": False} if is_switch else {}
        facts |= self.differs
        if facts.get("nargs") == 0:
            del facts["nargs"]
            facts = {"action": "store_const", "const": facts["default"] is not True, **facts}
        default = facts.get("default")
        is_shown = default not in (None, "", []) and not isinstance(default, bool) and "default:" not in self.help
        return {**facts, "help": f"{self.help} (default: {default})" if is_shown else self.help}


def F(spellings: str, help: str, **differs: Any) -> Flag:
    """Return a row.

    Args:
        spellings: of one flag, separated by spaces.
        help: without the default, which is added where there is one to show.
        differs: arguments of ``add_argument``.
    """
    return Flag(tuple(spellings.split()), help, differs)


class FlagGroup:
    """Rows that belong together, under a title of ``--help``."""

    def __init__(self, title: str, *flags: Flag) -> None:
        self.title, self.flags = title, flags

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags to a parser."""
        group = parser.add_argument_group(self.title)
        for flag in self.flags:
            group.add_argument(*flag.spellings, **flag.facts())
