"""What ranks own of a layout's tensors, by the rule that the engine's buffers and DTensor placements use."""

from __future__ import annotations

from megatron.core.distributed.fsdp.dtensor.placements import RowShard
from megatron.core.distributed.fsdp.layout.flat_layout import FlatLayout, rows_before


def rows(layout: FlatLayout, index: int, rank: int) -> tuple[int, int]:
    """Return the rows [begin, end) of tensor ``index`` that ``rank`` owns; begin == end where it owns none."""
    slot = layout.slots[index]
    begin, end = (
        rows_before(cut * layout.segment_numel, start=slot.start, row_numel=slot.row_numel, num_rows=slot.rows)
        for cut in (rank, rank + 1)
    )
    return begin, end


def row_ranges(layout: FlatLayout, index: int) -> tuple[tuple[int, int], ...]:
    """Return the rows [begin, end) of tensor ``index`` on each rank [num_ranks]: together all rows, in order."""
    return tuple(rows(layout, index, rank) for rank in range(layout.num_ranks))


def local_start(layout: FlatLayout, index: int, rank: int) -> int:
    """Return the offset, in elements within the rank's segment, of its first row of tensor ``index``; 0 for none."""
    begin, end = rows(layout, index, rank)
    slot = layout.slots[index]
    return slot.start + begin * slot.row_numel - rank * layout.segment_numel if end > begin else 0


def row_shard(layout: FlatLayout, index: int) -> RowShard:
    """Return the placement of tensor ``index`` on the axis whose ranks share the layout's buffer."""
    slot = layout.slots[index]
    return RowShard(slot.start, layout.segment_numel, slot.row_numel, slot.row_parts)
