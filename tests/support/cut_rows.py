"""Small tensors whose rows are cut, as those of large ones on many ranks are."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from torch import Size

from megatron.core.distributed.fsdp.layout.flat_layout import pack_rows
from megatron.core.distributed.fsdp.layout.granule import Granule
from megatron.core.distributed.fsdp.layout.row_groups import RowGroup

# The module, which the package hides behind the function of its name.
_FULLY_SHARD = importlib.import_module("megatron.core.distributed.fsdp.api.fully_shard")


def parts_of(shapes: Sequence[Size]) -> list[int]:
    """Return parts of rows for each shape: as few as possible and as many as possible, in turns."""
    found = []
    for index, shape in enumerate(shapes):
        divisors = [p for p in range(2, shape[1] + 1) if shape[1] % p == 0] if len(shape) > 1 else []
        found.append((divisors or [1])[-(index % 2)])
    return found


def cut_in_one_buffer(
    shapes: Sequence[Size], *, num_ranks: int, granules: Sequence[Granule | None] | None = None
) -> list[RowGroup]:
    """Lay all tensors out in one buffer, their rows cut; in place of ``group_by_rows``."""
    parts = [Granule.row_parts(p) for p in parts_of(shapes)] if num_ranks > 1 else None
    layout = pack_rows(shapes, num_ranks=num_ranks, alignment=1, granules=parts)
    return [RowGroup(tuple(range(len(shapes))), layout)] if shapes else []


@contextmanager
def rows_cut() -> Iterator[None]:
    """Cut the rows of all matrices that units which are made in this scope share between ranks."""
    with patch.object(_FULLY_SHARD, "group_by_rows", cut_in_one_buffer):
        yield
