"""Which tensors a layout's padding is for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from megatron.core.distributed.fsdp.layout.flat_layout import FlatLayout, pack_rows
from megatron.core.distributed.fsdp.layout.granule import Granule


@dataclass(frozen=True)
class PaddingShare:
    """Padding elements of a layout that are there for some of its tensors.

    Args:
        granule: what these tensors are cut between; None for what alignment and unequal sizes cost besides.
        shape: of each of them.
        num_tensors: how many there are of this shape and granule.
        padding_numel: elements that would be saved if they could be cut anywhere.
    """

    granule: Granule | None
    shape: torch.Size
    num_tensors: int
    padding_numel: int

    def __str__(self) -> str:
        if self.granule is None:
            return f"alignment: {self.padding_numel:,} elements of padding"
        number = f"{self.num_tensors} tensors" if self.num_tensors > 1 else "tensor"
        return f"{number} {list(self.shape)}, granule {self.granule}: {self.padding_numel:,} elements of padding"


def padding_report(layouts: Iterable[FlatLayout]) -> list[PaddingShare]:
    """Return which tensors the layouts' padding is for, the largest share first.

    The shares of a layout add up to its ``padding_numel``.

    The tensors of the largest granule are packed again as if they could be cut anywhere, and what that saves is their
    share; then those of the next granule, and so on. What is left at the end is for alignment.

    Ranks: pure.
    """
    shares = [share for layout in layouts for share in _shares(layout)]
    return sorted(shares, key=lambda share: -share.padding_numel)


def _shares(layout: FlatLayout) -> list[PaddingShare]:
    kinds: dict[tuple[Granule, torch.Size], list[int]] = {}
    for index, slot in sorted(enumerate(layout.slots), key=lambda item: -item[1].granule_numel):
        kinds.setdefault((slot.granule, slot.shape), []).append(index)
    shapes, granules = [slot.shape for slot in layout.slots], [slot.granule for slot in layout.slots]
    left, found = layout.padding_numel, []
    for (granule, shape), members in kinds.items():
        for index in members:
            shapes[index], granules[index] = torch.Size((shape.numel(),)), Granule.row()
        # First fit may do worse with tensors that are easier to place.
        least = min(left, pack_rows(shapes, num_ranks=layout.num_ranks, granules=granules).padding_numel)
        found.append(PaddingShare(granule, shape, len(members), left - least))
        left = least
    return [*found, PaddingShare(None, torch.Size(), len(layout.slots), left)]
