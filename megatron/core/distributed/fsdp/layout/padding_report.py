"""What a layout's padding is for."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping

import torch

from megatron.core.distributed.fsdp.layout.flat_layout import FlatLayout, pack_rows
from megatron.core.distributed.fsdp.layout.granule import Granule


@functools.lru_cache(maxsize=256)  # the layers of a model have the same layouts
def padding_by_granule(layout: FlatLayout) -> Mapping[str, int]:
    """Return the layout's padding elements, which add up to ``padding_numel``, by what tensors are cut between.

    The tensors of the largest granule are packed again as if they could be cut anywhere, and what that saves is their
    share; then those of the next granule, and so on. What is left is for "alignment".

    Ranks: pure.
    """
    members: dict[Granule, list[int]] = defaultdict(list)
    for index, slot in sorted(enumerate(layout.slots), key=lambda item: -item[1].granule_numel):
        members[slot.granule].append(index)
    shapes, granules = [slot.shape for slot in layout.slots], [slot.granule for slot in layout.slots]
    left, found = layout.padding_numel, {}
    for granule, indices in members.items():
        for index in indices:
            shapes[index], granules[index] = torch.Size((layout.slots[index].numel,)), Granule.row()
        # First fit may do worse with tensors that are easier to place.
        least = min(left, pack_rows(shapes, num_ranks=layout.num_ranks, granules=granules).padding_numel)
        found[str(granule)], left = left - least, least
    return {**found, "alignment": left}
