"""Conversations in a JSON lines file, of which an index of lines is in memory and nothing else."""

from __future__ import annotations

import json
import logging
import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy

from megatron.core.datasets.index_cache import Arrays, IndexCache
from megatron.core.datasets.megatron_dataset import hash_of
from megatron.core.datasets.rank_logging import warn_on_rank_0
from megatron.core.regular_file import parse_json

logger = logging.getLogger(__name__)

Conversation = list[dict[str, Any]]
Check = Callable[[Sequence[Mapping[str, Any]]], bool]
"""Raises ValueError for a conversation that cannot be trained on; else returns whether anything of it is learned."""


class SFTLowLevelDataset:
    """The lines of a file, each with conversations one after the other.

    A line is a JSON object whose ``messages`` are a list of turns: ``[{"role": "user", "content": "..."}, ...]``. Each turn of the
    system begins a conversation. Empty lines are left out.

    Every line is read and checked once, when the index is made; after that lines are read when they are asked for.

    Args:
        dataset_path: the file.
        check: called for each conversation while the index is made.
        checked_for: what ``check`` depends on, in words: an index is used again for the same words alone.
        cache_folder: folder of the index; None: beside the file, and in memory where that cannot be written.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is no such object or its conversation is refused, with the number of the line; or nothing is learned
            in the whole file.

    Ranks: each alone; a rank that finds the index of another in the folder reads only that.
    """

    def __init__(
        self, dataset_path: str, check: Check | None = None, *, checked_for: str = "", cache_folder: str | None = None
    ) -> None:
        if not os.path.isfile(dataset_path):
            raise FileNotFoundError(
                f"conversations must be in a file of JSON lines, got {dataset_path}, where there is none; give whole names, with .jsonl"
            )
        self.path, status = dataset_path, os.stat(dataset_path)
        self._nbytes = status.st_size
        description = json.dumps(
            {
                "path": os.path.abspath(dataset_path),
                "size": self._nbytes,
                "modified": status.st_mtime_ns,
                "checked for": checked_for,
            }
        )
        folder = cache_folder or os.path.join(os.path.dirname(dataset_path), "cache", "SFTDataset_indices")
        cache = IndexCache(
            folder, f"{hash_of(description)}-SFTDataset", description, must_write=cache_folder is not None
        )
        arrays = cache.load_or_build(lambda: self._build(check))
        self._begins, self._ends, not_learned = (arrays[name] for name in ("begins", "ends", "not_learned"))
        if not_learned.size and not_learned.size == len(self):
            raise ValueError(
                f"{dataset_path} must hold turns of an assistant, which are what is learned, got none in {len(self)} lines"
            )
        if not_learned.size:
            message = (
                "%s: %d of %d lines have no turn of an assistant, the first is line %d; they count nothing in the loss"
            )
            warn_on_rank_0(logger, message, dataset_path, not_learned.size, len(self), not_learned[0])

    def __len__(self) -> int:
        return int(self._begins.size)

    def __getitem__(self, idx: int) -> Conversation:
        """Return the turns of a line, of all its conversations.

        Raises:
            ValueError: the file is another than when the index was made.
        """
        begin, end = int(self._begins[idx]), int(self._ends[idx])
        with open(self.path, "rb", buffering=0) as file:
            changed = os.fstat(file.fileno()).st_size != self._nbytes
            line = b"" if changed else os.pread(file.fileno(), end - begin, begin)
        try:
            return turns_of(line)
        except ValueError as error:
            raise ValueError(
                f"{self.path} must not change while it is in use, got another file; start again"
            ) from error

    def line_number(self, idx: int) -> int:
        """Return the number of a line in the file, from 1; reads what is before it."""
        left, number = int(self._begins[idx]), 1
        with open(self.path, "rb") as file:
            while left > 0 and (piece := file.read(min(left, 1 << 22))):
                number, left = number + piece.count(b"\n"), left - len(piece)
        return number

    def _build(self, check: Check | None) -> Arrays:
        begins, ends, not_learned, end = array("q"), array("q"), array("q"), 0
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, 1):
                begin, end = end, end + len(line)
                if not line.strip():
                    continue
                begins.append(begin)
                ends.append(end)
                try:
                    learned = [check is None or check(one) for one in split_conversations(turns_of(line))]
                except ValueError as error:
                    raise ValueError(f"{self.path}, line {number}: {error}") from error
                if not any(learned):
                    not_learned.append(number)
        arrays = {"begins": begins, "ends": ends, "not_learned": not_learned}
        return {name: numpy.array(values, dtype=numpy.int64) for name, values in arrays.items()}


def turns_of(line: bytes) -> Conversation:
    """Return the turns of a line.

    Raises:
        ValueError: it is no JSON object with a list of turns.
    """
    try:
        content = parse_json(line)
    except ValueError as error:
        raise ValueError(f"a line must be a JSON object, got text that is none: {error}") from error
    turns = content.get("messages") if isinstance(content, dict) else None
    if not isinstance(turns, list) or not turns:
        got = f"the keys {', '.join(content)}" if isinstance(content, dict) else f"a {type(content).__name__}"
        raise ValueError(f'a line must be a JSON object whose "messages" are a list of turns, got {got}')
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
            raise ValueError(
                f'a turn must be an object with a "role" and its "content", got {str(turn)[:80]} as turn {number}'
            )
    return turns


def split_conversations(turns: Sequence[dict[str, Any]]) -> list[Conversation]:
    """Return the conversations of a line: each turn of the system begins one."""
    conversations: list[Conversation] = []
    for turn in turns:
        if not conversations or turn["role"] == "system":
            conversations.append([])
        conversations[-1].append(turn)
    return conversations
