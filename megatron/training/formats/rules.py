"""The language of tables that say where the elements of our tensors lie in those of another program.

A table maps names of ours, with ``{layer}`` and ``{expert}`` in place of numbers, to rules. A rule knows the layout, and
returns the parts of a tensor. It has one direction; ``views.inverse`` turns it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from megatron.core.distributed.fsdp.checkpoint import Entries, Part, StoredTensor, View, stored_sizes
from megatron.training.formats.architecture import Architecture

_NUMBERS = re.compile(r"(?<=layers\.)(?P<layer>[0-9]+)|(?<=local_experts\.)(?P<expert>[0-9]+)")
_NUM_NAMED = 8


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A tensor of ours that a rule is asked about.

    Args:
        numbers: its ``layer`` and ``expert``, which names of the other program may have as well.
        vocab_rows: rows that the other program's embedding has, without padding that repeats its last one.
    """

    name: str
    size: torch.Size
    numbers: Mapping[str, str]
    architecture: Architecture
    vocab_rows: int

    @property
    def start(self) -> tuple[int, ...]:
        return (0,) * len(self.size)

    def source(self, template: str) -> str:
        """Return the name of the other program."""
        return template.format(**self.numbers)


Rule = Callable[[Subject], list[Part]]
Table = Mapping[str, Rule]


def same(template: str) -> Rule:
    """Read a tensor that has the same layout there."""
    return lambda own: [Part(own.start, tuple(own.size), own.source(template), own.start)]


def transposed(template: str) -> Rule:
    """Read a matrix that is stored as [in, out]."""
    return lambda own: [Part((0, 0), tuple(own.size), own.source(template), (0, 0), True)]


def vocabulary(template: str) -> Rule:
    """Read rows that are ids. Rows that pad ours repeat the last one there, as Megatron-LM's converters do."""

    def parts(own: Subject) -> list[Part]:
        rows, *others = own.size
        held, source = min(rows, own.vocab_rows), own.source(template)
        rest = (0,) * len(others)
        found = [Part(own.start, (held, *others), source, own.start)]
        return found + [
            Part((row, *rest), (1, *others), source, (held - 1, *rest), is_copy=True) for row in range(held, rows)
        ]

    return parts


def halves(first: str, second: str) -> Rule:
    """Read rows that are two tensors there: a gate, and behind it what it gates."""

    def parts(own: Subject) -> list[Part]:
        half, rest = own.size[0] // 2, tuple(own.size[1:])
        return [
            Part((index * half, *own.start[1:]), (half, *rest), own.source(template), own.start)
            for index, template in enumerate((first, second))
        ]

    return parts


def queries_keys_values(queries: str, keys: str, values: str) -> Rule:
    """Read rows that are, group by group, queries of its heads, keys and values, from three tensors."""

    def parts(own: Subject) -> list[Part]:
        rest = tuple(own.size[1:])
        return [
            Part(
                (row, *own.start[1:]),
                (length, *rest),
                own.source((queries, keys, values)[kind]),
                (begin, *own.start[1:]),
            )
            for kind, row, begin, length in _rows_of_heads(own.architecture)
        ]

    return parts


def transposed_queries_keys_values(template: str) -> Rule:
    """Read the same rows from one matrix [in, out], or bias, of all queries, all keys and all values."""

    def parts(own: Subject) -> list[Part]:
        width = own.architecture["num_attention_heads"] * own.architecture["kv_channels"]
        source, is_matrix = own.source(template), len(own.size) == 2
        return [
            Part(
                (row, *own.start[1:]),
                (length, *own.size[1:]),
                source,
                (0, kind * width + begin) if is_matrix else (kind * width + begin,),
                is_matrix,
            )
            for kind, row, begin, length in _rows_of_heads(own.architecture)
        ]

    return parts


def _rows_of_heads(architecture: Architecture) -> Iterable[tuple[int, int, int, int]]:
    """Yield (0 queries, 1 keys or 2 values; first row in ours; first row among its kind; rows)."""
    groups, width = architecture["num_query_groups"], architecture["kv_channels"]
    heads = architecture["num_attention_heads"] // groups
    row = 0
    for group in range(groups):
        for kind, length in enumerate((heads * width, width, width)):
            yield kind, row, group * length, length
            row += length


def views_of(
    table: Table, sizes: Mapping[str, torch.Size], architecture: Architecture, *, vocab_rows: int
) -> dict[str, View]:
    """Return our tensors as views of another program's.

    Args:
        sizes: shapes of our tensors by name.

    Raises:
        NotImplementedError: the table has no rule for a tensor.
    """
    found: dict[str, View] = {}
    for name, size in sizes.items():
        numbers = {match.lastgroup or "": match[0] for match in _NUMBERS.finditer(name)}
        rule = table.get(_NUMBERS.sub(lambda match: f"{{{match.lastgroup}}}", name))
        if rule is None:
            raise NotImplementedError(f"{name} has no counterpart there; a model with it cannot be converted")
        own = Subject(name=name, size=size, numbers=numbers, architecture=architecture, vocab_rows=vocab_rows)
        found[name] = View(size, rule(own))
    return found


def check_stored(
    views: Mapping[str, View],
    entries: Entries,
    where: object,
    *,
    unused: Callable[[str], bool] = lambda name: False,
    may_be_longer: Callable[[str], bool] = lambda name: False,
) -> None:
    """Check that the other program's tensors are those that the views read: all of them, no others, in these shapes.

    Args:
        where: the checkpoint, for messages.
        unused: whether a tensor that no view reads may be there.
        may_be_longer: whether a tensor may have more rows than are read.

    Raises:
        ValueError: names what is missing, left over or of another shape.
    """
    wanted = stored_sizes(views)
    tensors = {name: entry.size for name, entry in entries.items() if isinstance(entry, StoredTensor)}
    faults = {
        "missing": [name for name in wanted if name not in tensors],
        "not of this model": [name for name in tensors if name not in wanted and not unused(name)],
        "of another shape": [
            f"{name} (there {list(tensors[name])}, for this model {list(size)})"
            for name, size in wanted.items()
            if name in tensors
            and tensors[name] != size
            and not (may_be_longer(name) and _is_longer(tensors[name], size))
        ],
    }
    said = [f"{kind}: {_listed(names)}" for kind, names in faults.items() if names]
    if said:
        raise ValueError(f"{where} must have the tensors of the model, got {' | '.join(said)}. Nothing was changed")


def _is_longer(there: torch.Size, size: torch.Size) -> bool:
    return len(there) == len(size) and there[0] > size[0] and there[1:] == size[1:]


def _listed(names: list[str]) -> str:
    more = len(names) - _NUM_NAMED
    return ", ".join(names[:_NUM_NAMED]) + (f" and {more} more" if more > 0 else "")
