"""The command line as Megatron-LM's ``args``: what it saves in checkpoints, and takes from them."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from megatron.training.cli.flag_parser import Fate, FlagParser
from megatron.training.cli.upstream_flags import UPSTREAM_FLAGS, UpstreamFlag

_KINDS: dict[str, Any] = {"int": int, "float": float, "bool": lambda text: text.lower() == "true"}


@dataclass(frozen=True, kw_only=True)
class MegatronLmArgs:
    """Plain arguments by Megatron-LM's names, for checkpoints that it reads."""

    values: Mapping[str, Any] = field(default_factory=dict)
    """With its defaults where the command line says nothing."""


def megatron_lm_args(parser: FlagParser, settings: Mapping[str, Any], fates: Iterable[Fate]) -> MegatronLmArgs:
    """Return the arguments of a command line.

    Args:
        parser: of the flags in effect.
        settings: theirs, by name, without those that are malformed.
        fates: what became of each flag; those that change nothing here say what they say there.
    """
    values = {name_of(flag): upstream.default for flag, upstream in UPSTREAM_FLAGS.items()}
    for fate in fates:
        upstream = UPSTREAM_FLAGS.get(fate.flag)
        if upstream is not None and fate.kind in ("always so", "said once"):
            values[name_of(fate.flag)] = _value(upstream, fate.values)
    for action in parser._actions:
        for flag in action.option_strings:
            upstream = UPSTREAM_FLAGS.get(flag)
            if upstream is not None and action.dest in settings:
                values[name_of(flag)] = _own_value(flag, upstream, action, settings[action.dest])
    values["apply_layernorm_1p"] = values["layernorm_zero_centered_gamma"]  # as older versions call it
    return MegatronLmArgs(values={name: _plain(value) for name, value in values.items()})


def _own_value(flag: str, upstream: UpstreamFlag, action: argparse.Action, value: Any) -> Any:
    """Return a setting in Megatron-LM's sense: a switch may have a name here that says the opposite."""
    if action.nargs != 0 or action.dest == name_of(flag):
        return value
    is_given = value == action.const and action.const != action.default
    return not upstream.default if is_given else upstream.default


def name_of(flag: str) -> str:
    """Return the name of the setting that a flag gives in Megatron-LM, or would."""
    upstream = UPSTREAM_FLAGS.get(flag)
    return (upstream.dest if upstream is not None else "") or flag.lstrip("-").replace("-", "_")


def _value(upstream: UpstreamFlag, words: tuple[str, ...]) -> Any:
    if upstream.nargs == 0:
        return not upstream.default if isinstance(upstream.default, bool) else True
    if upstream.nargs is not None:  # a list in quotes is one word of the shell
        words = tuple(word for given in words for word in given.split())
    read = [_KINDS.get(upstream.kind, str)(word) for word in words]
    return read if upstream.nargs is not None else read[0]


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str, torch.dtype)) else str(value)
