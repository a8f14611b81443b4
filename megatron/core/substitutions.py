"""Settings that are taken as others, since the results are the same or nothing would read them: the rows of tables.

Configurations have such a table each (``CheckedConfig.substitutions``), and the command line follows the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Substitution:
    """Values of settings that are taken as others."""

    when: Callable[[Any], bool]
    said: str
    """What the user is told, in one line; formatted with the settings."""

    takes: Mapping[str, Any] | Callable[[Any], Mapping[str, Any]]
    """The values that are taken, by setting."""

    def text(self, settings: Any) -> str:
        """Format what is said."""
        return self.said.format_map(_Attributes(settings))

    def values(self, settings: Any) -> Mapping[str, Any]:
        """Return the values that are taken."""
        return self.takes(settings) if callable(self.takes) else self.takes


class _Attributes(dict[str, Any]):
    def __init__(self, settings: Any) -> None:
        super().__init__()
        self._settings = settings

    def __missing__(self, name: str) -> Any:
        value = getattr(self._settings, name)
        return " ".join(map(str, value)) if isinstance(value, list | tuple) else value


def without_effect(
    defaults: Mapping[str, Any],
    *,
    needs: Callable[[Any], bool],
    words: str,
    name_of: Callable[[str], str] = str,
    choices: Mapping[str, Callable[[Any], bool]] = MappingProxyType({}),
) -> list[Substitution]:
    """Return a row for each setting that has no effect where something else is not given.

    Args:
        defaults: the settings, with the values that they have where they are not given.
        needs: whether they have an effect.
        words: what ``needs`` asks for.
        name_of: what a setting is called.
        choices: settings whose values must be of some kind; others are left for the checks to refuse.
    """
    return [
        Substitution(
            lambda c, name=name, default=default: (  # type: ignore[misc]
                not needs(c)
                and _differs(getattr(c, name), default)
                and (name not in choices or choices[name](getattr(c, name)))
            ),
            f"{name_of(name)} has no effect without {words}",
            {name: default},
        )
        for name, default in defaults.items()
    ]


def _differs(value: Any, default: Any) -> bool:
    if isinstance(value, list | tuple) and isinstance(default, list | tuple):
        return list(value) != list(default)
    return bool(value != default)
