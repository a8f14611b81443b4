"""The file of settings that were chosen: JSON, one entry for each kind of run."""

from __future__ import annotations

import json
import os
import reprlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.regular_file import parse_json, read_regular

_FORMAT = "settings chosen by the tuner of fully sharded data parallelism"
_VERSION = 1
_MOST_NAMED = 4


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What was chosen for one kind of run."""

    of: Mapping[str, str]
    """What the run was, by name: all of it must be the same for the settings to be taken."""

    settings: Mapping[str, Any]
    reason: str
    when: str
    rows: tuple[tuple[str, str], ...] = ()
    too_few_seconds: float | None = None
    """After these the tuner ended before all candidates were measured; None: it was done."""


_KEYS, _CRC32 = ("when", "settings", "reason", "measured", "too_few_seconds", "of"), "crc32"


def _sealed(one: Entry) -> dict[str, Any]:
    """Return an entry as it is written: with a checksum, without which a flipped bit would be another setting."""
    values = (one.when, one.settings, one.reason, one.rows, one.too_few_seconds, one.of)
    content = dict(zip(_KEYS, values, strict=True))
    return {**content, _CRC32: _crc32_of(content)}


def _crc32_of(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps({name: content.get(name) for name in _KEYS}, sort_keys=True).encode())


class TunedFile:
    """A file of entries, which need not be there yet.

    Raises:
        ValueError: the file is none of ours, or damaged.

    Ranks: 0.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: list[Entry] = []
        if path.is_dir():
            raise ValueError(f"{path} must be a file of tuned settings, got a folder; give {path / 'tuned.json'}, say")
        if os.path.lexists(path):
            if path.exists() and not path.is_file():
                raise self._damaged("it is no regular file")
            self.entries = [self._entry(one) for one in self._read()]

    def find(self, of: Mapping[str, str]) -> Entry | None:
        """Return the entry of this kind of run; None if there is none."""
        return next((entry for entry in self.entries if entry.of == dict(of)), None)

    def differences(self, of: Mapping[str, str]) -> str:
        """Say in what the nearest entry differs; empty if there is no entry."""
        texts = [
            [
                f"{name} {entry.of.get(name, 'nothing')} there and {of.get(name, 'nothing')} here"
                for name in dict.fromkeys((*of, *entry.of))
                if entry.of.get(name) != of.get(name)
            ]
            for entry in self.entries
        ]
        nearest = min(texts, key=len, default=[])
        more = len(nearest) - _MOST_NAMED
        return "; ".join(nearest[:_MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")

    def add(self, entry: Entry) -> None:
        """Write the file with this entry, in place of one of the same kind of run.

        Raises:
            OSError: it cannot be written; the old one stays.
        """
        self.entries = [one for one in self.entries if one.of != entry.of] + [entry]
        content = {"format": _FORMAT, "version": _VERSION, "entries": [_sealed(one) for one in self.entries]}
        beside = self.path.with_name(f".{self.path.name}.new-{os.getpid()}")
        try:
            beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            os.replace(beside, self.path)
        except OSError:
            beside.unlink(missing_ok=True)
            raise

    def check_writable(self) -> None:
        """Check that the file can be written, before minutes are spent on what it is to hold.

        Raises:
            OSError: it cannot.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            beside = self.path.with_name(f".{self.path.name}.new-{os.getpid()}")
            beside.touch()
            beside.unlink()
        except OSError as error:
            raise OSError(
                f"{self.path} must be a file that can be written, got: {error.strerror}; give one in another folder"
            ) from error

    def _read(self) -> list[Any]:
        try:
            content = parse_json(read_regular(self.path))
        except ValueError as error:
            raise self._damaged(str(error)) from error
        if (
            not isinstance(content, dict)
            or content.get("format") != _FORMAT
            or not isinstance(content.get("entries"), list)
        ):
            raise self._damaged("it says not that it is one")
        if content.get("version") != _VERSION:
            raise self._damaged(f"its version must be {_VERSION}, got {content.get('version')}")
        entries: list[Any] = content["entries"]
        return entries

    def _entry(self, one: Any) -> Entry:
        try:
            of, settings, reason, when = one["of"], one["settings"], one["reason"], one["when"]
            rows = tuple((str(name), str(text)) for name, text in one["measured"])
            too_few = one.get("too_few_seconds")
            too_few = None if too_few is None else float(too_few)
        except (TypeError, KeyError, ValueError, OverflowError) as error:
            raise self._damaged(f"an entry lacks {error}") from error
        if not (isinstance(of, dict) and isinstance(settings, dict)):
            raise self._damaged("an entry must have objects for what it is of, and for its settings")
        if unknown := sorted(set(one) - {*_KEYS, _CRC32}):
            raise self._damaged(f"an entry has {reprlib.repr(unknown)}")
        if one.get(_CRC32) not in (None, _crc32_of(one)):
            raise ValueError(
                f"{self.path}: an entry must have its checksum ({_CRC32}), got another: it was damaged or edited; measure again with "
                f"another file, or delete {_CRC32} from the entry to keep an edit"
            )
        return Entry(of=of, settings=settings, reason=str(reason), when=str(when), rows=rows, too_few_seconds=too_few)

    def _damaged(self, why: str) -> ValueError:
        return ValueError(
            f"{self.path} must be a file of tuned settings, got something else ({why}); name another file, or delete it"
        )
