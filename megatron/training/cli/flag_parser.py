"""The parser of flags, each of which is in effect, accepted because it is always so here, or refused with the reason."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


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


class FlagParser(argparse.ArgumentParser):
    """An argument parser without abbreviations that names every fault of a command line at once.

    Args:
        always_so: flags that are accepted because they ask for what always holds.
        refused: flags of Megatron-LM that are refused, with the reason.
        refused_families: (prefix, reason) of flags that are refused together.
    """

    def __init__(
        self,
        *,
        always_so: Mapping[str, AlwaysSo],
        refused: Mapping[str, str],
        refused_families: Sequence[tuple[str, str]],
        description: str,
        prog: str | None = None,
    ) -> None:
        facts = "\n".join(f"  {' '.join((flag, *so.values[:1]))}: {so.fact}" for flag, so in sorted(always_so.items()))
        super().__init__(
            prog=prog,
            usage="%(prog)s <flags>",
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            epilog=f"accepted because they ask for what always holds here:\n{facts}",
        )
        self.always_so, self.refused, self.refused_families = always_so, refused, refused_families

    def error(self, message: str) -> None:  # type: ignore[override]
        raise FlagError(message)

    def parse_flags(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse the flags in effect, under their names in Megatron-LM.

        Raises:
            FlagError: flags are unknown, refused or malformed; the message names all of them.
        """
        faults: list[str] = []
        rest: list[str] = []
        for flag, values in _split_by_flag(argv):
            if flag is not None and flag in self.always_so:
                faults += _fault_of_fact(flag, values, self.always_so[flag])
            elif flag is not None and (reason := self.reason_against(flag)) is not None:
                faults.append(f"{flag} is refused: {reason}")
            elif flag is not None and flag.startswith("--") and flag not in self._option_string_actions:
                faults.append(f"{flag} is unknown{self._nearest(flag)}")
            else:
                rest += values if flag is None else [flag, *values]
        if faults:
            raise FlagError("\n".join(faults))
        return self.parse_args(rest)

    def reason_against(self, flag: str) -> str | None:
        """Return why a flag is refused; None if it is not."""
        if flag in self._option_string_actions or flag in self.always_so:
            return None
        families = (reason for start, reason in self.refused_families if flag.startswith(start))
        return self.refused.get(flag) or next(families, None)

    def _nearest(self, flag: str) -> str:
        known = [name for name in self._option_string_actions if name.startswith("--")]
        close = difflib.get_close_matches(flag, [*known, *self.always_so, *self.refused], n=1, cutoff=0.75)
        return f"; did you mean {close[0]}?" if close else "; see --help for the flags that are known"


def _split_by_flag(argv: Sequence[str]) -> list[tuple[str | None, list[str]]]:
    """Split into [(flag, its values)], also ``--flag=value``; the flag of values before the first one is None."""
    parts: list[tuple[str | None, list[str]]] = [(None, [])]
    for token in argv:
        if token.startswith("--") and len(token) > 2:
            flag, equals, value = token.partition("=")
            parts.append((flag, [value] if equals else []))
        else:
            parts[-1][1].append(token)
    return parts


def _fault_of_fact(flag: str, values: list[str], so: AlwaysSo) -> list[str]:
    if not so.values:
        return [f"{flag} takes no value, got {' '.join(values)}"] if values else []
    if len(values) != 1:
        return [f"{flag} takes one value, got {' '.join(values) or 'none'}"]
    if values[0] not in so.values:
        return [f"{flag} must be {' or '.join(so.values)}, got {values[0]}: {so.otherwise or so.fact}"]
    return []
