"""Between the words of a command line and Megatron-LM's ``args``: what it saves in checkpoints, takes from them, and scripts change."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from megatron.training.cli.flag_parser import Fate, FlagError, FlagParser, split_by_flag
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


def with_values(words: Sequence[str], values: Mapping[str, Any], parser: FlagParser) -> tuple[str, ...]:
    """Return a command line that gives arguments these values, and the others what ``words`` gives them.

    Args:
        values: by our names of arguments, or Megatron-LM's.

    Raises:
        FlagError: no flag gives an argument its value.
    """
    kept = [
        [*([] if flag is None else [flag]), *given]
        for flag, given in split_by_flag(words)
        if flag is None or not values.keys() & _names(flag, parser)
    ]
    return tuple(joined([*kept, *(words_of(*item, parser) for item in values.items())]))


def joined(parts: Iterable[Sequence[str]]) -> list[str]:
    """Return the words of flags with their values; one value is joined to its flag, so that it cannot be read as another flag."""
    return [
        word for part in parts for word in (["=".join(part)] if len(part) == 2 and part[0].startswith("--") else part)
    ]


def _names(flag: str, parser: FlagParser) -> set[str]:
    """Return the names of the arguments that a flag sets."""
    flags = [name for name in parser.renamed.get(flag, (flag,)) if name.startswith("--")]
    own = (parser._option_string_actions.get(name) for name in flags)
    return {name_of(name) for name in flags} | {action.dest for action in own if action is not None}


def words_of(name: str, value: Any, parser: FlagParser) -> list[str]:
    """Return the flag, with its values, that gives an argument a value; nothing if the value is None or the default.

    Raises:
        FlagError: no flag gives it this value.
    """
    own = [action for action in parser._actions if action.dest == name]
    upstream = {flag: entry for flag, entry in UPSTREAM_FLAGS.items() if name_of(flag) == name and not own}
    default = parser.get_default(name) if own else next((entry.default for entry in upstream.values()), None)
    if value is None or _word(value) == _word(default):
        return []
    # A switch of Megatron-LM gives the opposite of the default; where there are two, their names tell them apart.
    switches = [(action.option_strings[0], action.const) for action in own if action.nargs == 0] + [
        (flag, value if len(upstream) == 1 else not flag.startswith(("--no-", "--disable-")))
        for flag, entry in upstream.items()
        if entry.nargs == 0
    ]
    if (flag := next((flag for flag, const in switches if const == value), None)) is not None:
        return [flag]
    takers = [(action.option_strings[0], action.nargs) for action in own] + [
        (flag, entry.nargs) for flag, entry in upstream.items()
    ]
    for flag, nargs in takers:
        if nargs != 0:
            is_list = nargs is not None and isinstance(value, (list, tuple))
            return [flag, *(map(_word, value) if is_list else [_word(value)])]
    raise FlagError(f"{name} must be a value that a flag gives, got {value}")


def _word(value: Any) -> str:
    """Return a value as it is typed."""
    if isinstance(value, torch.dtype):
        return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}.get(value, str(value))
    if isinstance(value, Enum):
        return value.name
    return value if isinstance(value, str) else str(value).replace(" ", "")


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
