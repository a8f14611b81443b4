"""The parser of flags, each of which is in effect, accepted because of what holds here, or refused with the reason."""

from __future__ import annotations

import argparse
import copy
import difflib
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.training.cli.upstream_flags import UPSTREAM_FLAGS, UpstreamFlag


class FlagError(ValueError):
    """An error of the command line; the message has one line for each fault and says what to change."""


@dataclass(frozen=True, kw_only=True)
class AlwaysSo:
    """A flag of Megatron-LM that is accepted because it asks for what always holds here."""

    fact: str
    """What always holds."""

    values: tuple[str, ...] = ()
    """The accepted values; empty: the flag takes none."""

    otherwise: str = ""
    """Why another value is refused."""

    needs: tuple[str, ...] = ()
    """Flags that must be given too, as in Megatron-LM."""


def by_flag(table: str) -> dict[str, str]:
    """Return the text for each flag.

    Args:
        table: ``FLAGS: TEXT`` on each line, which goes on where the next one is indented. A flag that ends with ``*`` stands for all
            flags that begin so.
    """
    found: dict[str, str] = {}
    for row in table.replace("\n    ", " ").strip().splitlines():
        flags, _, text = row.partition(": ")
        found |= dict.fromkeys(flags.split(), text)
    return found


@dataclass(frozen=True)
class Fate:
    """What became of one flag of a command line."""

    flag: str
    values: tuple[str, ...]
    kind: str
    """One of ``FATES``."""

    words: str = ""
    """The fact, what is done instead, or the fault."""

    @property
    def is_fault(self) -> bool:
        """Whether the flag is not accepted."""
        return self.kind in _FAULTS


FATES = ("in effect", "always so", "said once", "no effect", "refused", "unknown", "malformed")
"""``no effect``: the flag is given at the value that it has anyway, or as ``false``."""

_Part = tuple[str | None, list[str]]
"""A flag and its values."""

_FAULTS = ("refused", "unknown", "malformed")
_DASHES = "-\u2010\u2011\u2012\u2013\u2014\u2015"
_ALIKE = 0.84  # of letters, of a flag and a misspelling of it; below, flags of other meanings are alike
"""What flags begin with, and what word processors make of it."""

_SWITCH = UpstreamFlag(False, nargs=0)


@dataclass
class CommandLine:
    """A command line that was read: the settings of the flags in effect, and the fate of each flag."""

    args: argparse.Namespace
    """Without the settings whose flags are malformed."""

    fates: list[Fate] = field(default_factory=list)
    malformed: frozenset[str] = frozenset()
    """The names of these settings."""

    @property
    def faults(self) -> list[str]:
        """One line for each flag that is not accepted."""
        return [fate.words for fate in self.fates if fate.is_fault]

    @property
    def said_once(self) -> list[str]:
        """What rank 0 says about flags that were given."""
        return list(dict.fromkeys(fate.words for fate in self.fates if fate.kind == "said once"))


class FlagParser(argparse.ArgumentParser):
    """An argument parser without abbreviations that names every fault of a command line at once.

    Args:
        always_so: flags that are accepted because they ask for what always holds.
        said_once: flags that are accepted, since what is done instead gives the same results.
        refused: flags that are refused, with the reason; see ``by_flag``.
        renamed: old flags, with what is read in their place.
    """

    def __init__(
        self,
        *,
        always_so: Mapping[str, AlwaysSo],
        said_once: Mapping[str, str],
        refused: Mapping[str, str],
        renamed: Mapping[str, Sequence[str]],
        description: str,
        prog: str | None = None,
    ) -> None:
        super().__init__(
            prog=prog,
            usage="%(prog)s <flags>",
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.always_so, self.said_once = always_so, said_once
        self.refused = {flag: reason for flag, reason in refused.items() if not flag.endswith("*")}
        self.refused_families = {flag[:-1]: reason for flag, reason in refused.items() if flag.endswith("*")}
        self.renamed = renamed

    def error(self, message: str) -> None:  # type: ignore[override]
        raise FlagError(message)

    def parse_flags(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse the flags in effect, under their names in Megatron-LM.

        Raises:
            FlagError: flags are unknown, refused or malformed; the message names all of them.
        """
        line = self.read(argv)
        if line.faults:
            raise FlagError("\n".join(line.faults))
        return line.args

    def read(self, argv: Sequence[str]) -> CommandLine:
        """Read a command line; faults are in the result."""
        line = CommandLine(self.parse_args([]))
        malformed: set[str] = set()
        for flag, values in self._in_names_of_today(split_by_flag(argv), line):
            if flag is None:
                words = f"{' '.join(values)} is no flag; flags start with --"
                line.fates += [Fate("", tuple(values), "malformed", words)] if values else []
            else:
                line.fates.append(self._read_flag(flag, values, line.args, malformed))
        line.fates += self._without_companions({fate.flag for fate in line.fates if fate.kind != "no effect"})
        for dest in malformed:
            delattr(line.args, dest)
        line.malformed = frozenset(malformed)
        return line

    def _in_names_of_today(self, parts: Iterable[_Part], line: CommandLine) -> Iterator[_Part]:
        """Put flags in the place of their old names, and note that."""
        for flag, values in parts:
            if flag is None or flag not in self.renamed:
                yield flag, values
                continue
            names = self.renamed[flag]
            line.fates.append(
                Fate(flag, tuple(values), "said once", f"{flag} is taken as {' '.join(names)}, its name now")
            )
            yield from split_by_flag([*names, *values])[1:]

    def _without_companions(self, given: set[str]) -> list[Fate]:
        """Return a fault for each flag that is given without one that it needs."""
        return [
            Fate(flag, (), "refused", f"{flag} needs {needed}, got none")
            for flag, so in self.always_so.items()
            for needed in so.needs
            if flag in given and needed not in given
        ]

    def _read_flag(self, flag: str, values: list[str], args: argparse.Namespace, malformed: set[str]) -> Fate:
        def fate(kind: str, words: str = "") -> Fate:
            return Fate(flag, tuple(values), kind, words)

        own, upstream = self._option_string_actions.get(flag), UPSTREAM_FLAGS.get(flag)
        if upstream is None and flag in self.said_once:
            upstream = _SWITCH  # of an earlier version
        is_switch = own.nargs == 0 if own is not None else upstream is not None and upstream.nargs == 0
        if is_switch and [value.lower() for value in values] in (["true"], ["false"]):
            if values[0].lower() == "false":
                if (
                    own is not None and getattr(args, own.dest) == own.const
                ):  # it was given before: the last word counts
                    setattr(args, own.dest, own.default)
                return fate("no effect", f"{flag} false: as if it were not given")
            values = []
        if own is not None:
            try:
                self._with(own).parse_args(_as_argparse_reads(flag, values, own), args)
            except FlagError as error:
                malformed.add(own.dest)
                if (
                    own.choices is not None
                    and upstream is not None
                    and len(values) == 1
                    and values[0] in upstream.choices
                ):
                    served = ", ".join(map(str, own.choices))
                    return fate("refused", f"{flag} {values[0]} is refused: it is not served; use one of {served}")
                text = str(error).removeprefix("argument ").replace("/".join(own.option_strings), flag, 1)
                extra = text.startswith("unrecognized arguments")
                takes = "no value" if is_switch else "one value" if own.nargs is None else "fewer values"
                return fate("malformed", f"{flag} takes {takes}, got {' '.join(values)}" if extra else text)
            return fate("in effect", str(own.help))
        if flag in self.always_so:
            so = self.always_so[flag]
            fault = _fault_of_fact(flag, values, so)
            if not fault or flag not in self.said_once:
                return fate("refused", fault) if fault else fate("always so", so.fact)
        if flag in self.said_once:
            words_of = [word for value in values for word in value.split()] if upstream and upstream.nargs else values
            assert upstream is not None, "an unknown flag that is said once is a switch"
            if fault := _fault_of_value(flag, words_of, upstream):
                return fate("malformed", fault)
            return fate("said once", f"{' '.join((flag, *values))}: {self.said_once[flag]}")
        is_unheard_of = upstream is None and flag not in self.refused
        if is_unheard_of and (close := self._close_to(flag)) is not None:
            return fate("unknown", f"{flag} is unknown; did you mean {close}?")
        if (reason := self.reason_against(flag)) is not None:
            if upstream is not None and _is_default(flag, values, upstream):
                return fate("no effect", f"{' '.join((flag, *values))}: the default, which asks for nothing")
            return fate("refused", f"{flag} is refused: {reason}")
        return fate("unknown", f"{flag} is unknown; see --help for the flags that are known")

    def _with(self, own: argparse.Action) -> FlagParser:
        """Return this parser with one of its flags: it goes through all that it has each time that it parses."""
        parser = copy.copy(self)
        parser._actions = [own]
        return parser

    def reason_against(self, flag: str) -> str | None:
        """Return why a flag is refused; None if it is not."""
        if flag in self._option_string_actions or flag in self.always_so or flag in self.said_once:
            return None
        families = (reason for start, reason in self.refused_families.items() if flag.startswith(start))
        return self.refused.get(flag) or next(families, None)

    def refused_by_reason(self) -> dict[str, list[str]]:
        """Return all spellings of Megatron-LM, and others that are known, which are refused, by their reasons."""
        flags: dict[str, list[str]] = defaultdict(list)
        for flag in sorted({*UPSTREAM_FLAGS, *self.refused}):
            if (reason := self.reason_against(flag)) is not None:
                flags[reason].append(flag)
        return dict(flags)

    def format_help(self) -> str:
        """Format what ``--help`` prints: groups of flags in effect, what always holds, what is said once, what is refused."""
        renamed = [f"{flag}: {' '.join(names)}" for flag, names in sorted(self.renamed.items())]
        facts = [f"{' '.join((flag, *so.values[:1]))}: {so.fact}" for flag, so in sorted(self.always_so.items())]
        said = [f"{flag}: {instead}" for flag, instead in sorted(self.said_once.items())]
        refused = [f"{', '.join(flags)}: {reason}" for reason, flags in self.refused_by_reason().items()]
        return "\n".join(
            (
                super().format_help(),
                *_help_section("accepted because they ask for what always holds here", facts),
                *_help_section("accepted, with what is done instead, which is said once", said),
                *_help_section("old names, which are taken as those of today", renamed),
                *_help_section("refused, except at Megatron-LM's default", refused),
            )
        )

    def _close_to(self, flag: str) -> str | None:
        """Return the flag that an unknown one is a misspelling of, by its letters; None if there is none."""
        known = [name for name in self._option_string_actions if name.startswith("--")]
        served = (name for name in (*UPSTREAM_FLAGS, *self.always_so) if self.reason_against(name) is None)
        close = difflib.get_close_matches("--" + flag.lstrip(_DASHES), [*known, *served], 1, _ALIKE)
        return close[0] if close else None


def _help_section(title: str, entries: Iterable[str]) -> list[str]:
    wrapped = [
        textwrap.fill(
            entry, 118, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False, break_long_words=False
        )
        for entry in entries
    ]
    return [f"{title}:", *wrapped, ""]


def split_by_flag(argv: Sequence[str]) -> list[_Part]:
    """Split into [(flag, its values)], also ``--flag=value``; the flag of values before the first one is None."""
    parts: list[_Part] = [(None, [])]
    for token in argv:
        if (token.startswith("--") and len(token) > 2) or (
            token[:1] in _DASHES and token.lstrip(_DASHES)[:1].isalpha()
        ):
            flag, equals, value = token.partition("=")
            parts.append((flag, [value] if equals else []))
        else:
            parts[-1][1].append(token)
    return parts


def _as_argparse_reads(flag: str, values: list[str], action: argparse.Action) -> list[str]:
    """Return the words of a flag in effect: a list in quotes is one word of the shell; one value may begin with a minus."""
    if action.nargs is None and len(values) == 1:
        return [f"{flag}={values[0]}"]
    splits = action.nargs in ("+", "*") or isinstance(action.nargs, int)
    return [flag, *(word for value in values for word in (value.split() if splits else [value]))]


def _fault_of_fact(flag: str, values: list[str], so: AlwaysSo) -> str:
    if not so.values:
        return f"{flag} takes no value, got {' '.join(values)}" if values else ""
    if len(values) != 1:
        return f"{flag} takes one value, got {' '.join(values) or 'none'}"
    if values[0] not in so.values:
        return f"{flag} must be {' or '.join(so.values)}, got {values[0]}: {so.otherwise or so.fact}"
    return ""


_KINDS: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "bool": lambda text: text.lower() == "true"}


def _fault_of_value(flag: str, values: list[str], upstream: UpstreamFlag) -> str:
    """Return what is wrong with the values of a flag that is accepted without an effect; empty if nothing is."""
    wanted = {0: "no value", None: "one value", "+": "one or more values"}.get(
        upstream.nargs, f"{upstream.nargs} values"
    )
    counts = {0: len(values) == 0, None: len(values) == 1, "+": len(values) > 0, "*": True}
    if not counts.get(upstream.nargs, len(values) == upstream.nargs):
        return f"{flag} takes {wanted}, got {' '.join(values) or 'none'}"
    for value in values:
        if upstream.choices and value not in upstream.choices:
            return f"{flag} must be one of {', '.join(upstream.choices)}, got {value}"
        try:
            _KINDS.get(upstream.kind, str)(value)
        except ValueError:
            return f"{flag} must be of type {upstream.kind}, got {value}"
    return ""


def _is_default(flag: str, values: list[str], upstream: UpstreamFlag) -> bool:
    """Whether a flag is given at Megatron-LM's default, and so asks for nothing."""
    if upstream.nargs == 0:
        turns_off = flag.startswith("--no-") and not upstream.dest.startswith("no_")
        return upstream.default is False if turns_off else upstream.default is True and not upstream.dest
    try:
        read = [_KINDS.get(upstream.kind, str)(value) for value in values]
    except ValueError:
        return False
    return read == upstream.default if isinstance(upstream.default, list) else read == [upstream.default]
