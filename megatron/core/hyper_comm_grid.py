"""A grid of ranks with named axes, and process groups over any of them."""

from __future__ import annotations

import os
from math import prod
from typing import Any

import numpy as np
import torch.distributed as dist


class HyperCommGrid:
    """A grid of ranks, and the process groups that were made over its axes.

    Args:
        shape: the length of each axis.
        dim_names: their names; neighbouring ranks differ on the first.
        rank_offset: the rank of the grid's first cell.
        backend: that of the groups; None: the default one.

    Raises:
        ValueError: shape and names differ in length, or the offset is negative.
        RuntimeError: there are fewer ranks than the grid has cells, or their number is not known.

    Source: Megatron-Core's HyperCommGrid (names, signatures and the order of ranks).
    """

    def __init__(
        self, shape: list[int], dim_names: list[str], rank_offset: int = 0, backend: str | None = None
    ) -> None:
        if len(shape) != len(dim_names):
            raise ValueError(f"each axis needs one name, got shape {shape} and names {dim_names}")
        if rank_offset < 0:
            raise ValueError(f"rank_offset must be at least 0, got {rank_offset}")
        self.shape, self.dim_names = list(shape), list(dim_names)
        self.rank_offset, self.size, self.backend = rank_offset, prod(shape), backend
        ranks = _world_size() - rank_offset
        if self.size > ranks:
            raise RuntimeError(f"a grid {shape} needs {self.size} ranks, got {ranks} from rank {rank_offset} on")
        self._groups: dict[str, Any] = {}

    def create_pg(self, dims: str | list[str], *, view: None = None, **kwargs: Any) -> dist.ProcessGroup | None:
        """Make the groups over these axes, and return this rank's.

        Args:
            kwargs: those of ``torch.distributed.new_subgroups_by_enumeration``.

        Raises:
            KeyError: it was made before.

        Ranks: all of the world.
        """
        key = self._key(dims, view)
        if key in self._groups:
            raise KeyError(f"the process group over {key} exists already; get_pg returns it")
        group: dist.ProcessGroup | None
        group, _ = dist.new_subgroups_by_enumeration(self.get_rank_enum(dims), backend=self.backend, **kwargs)
        self._groups[key] = group
        return group

    def get_pg(self, dims: str | list[str], *, view: None = None) -> dist.ProcessGroup:
        """Return this rank's group over these axes.

        Raises:
            KeyError: it was not made.
        """
        key = self._key(dims, view)
        if key not in self._groups:
            raise KeyError(f"there is no process group over {key}; call create_pg first")
        group: dist.ProcessGroup = self._groups[key]
        return group

    def get_rank_enum(self, dims: str | list[str], *, view: None = None) -> list[list[int]]:
        """Return the ranks of all groups over these axes; within a group those that are first in ``dim_names`` run fastest."""
        axes = self._key(dims, view).split("-")
        slowest_first = self.dim_names[::-1]
        cells = np.arange(self.rank_offset, self.rank_offset + self.size).reshape(self.shape[::-1])
        sources = [slowest_first.index(name) for name in axes]
        cells = np.moveaxis(cells, sources, range(-len(axes), 0))
        ranks: list[list[int]] = cells.reshape(-1, prod(cells.shape[-len(axes) :])).tolist()
        return ranks

    def is_current_rank_in_grid(self) -> bool:
        """Return whether this rank is a cell of the grid."""
        return self.rank_offset <= dist.get_rank() < self.rank_offset + self.size

    def destroy(self) -> None:
        """Destroy the groups that were made, where this rank is in them."""
        for group in self._groups.values():
            if group is not None and group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)
        self._groups.clear()

    def _key(self, dims: str | list[str], view: None) -> str:
        """Return the names of axes, slowest first, joined by "-"."""
        if view is not None:
            raise NotImplementedError(
                f"HyperCommGrid: views of the ranks are not served, got view={view!r}; make another grid"
            )
        names = [dims] if isinstance(dims, str) else dims
        unknown = [name for name in names if name not in self.dim_names]
        if unknown:
            raise ValueError(f"axes must be among {self.dim_names}, got {unknown[0]!r}")
        return "-".join(sorted(names, key=self.dim_names[::-1].index))


def _world_size() -> int:
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    if not dist.is_initialized():
        raise RuntimeError("the number of ranks must be known: initialize torch.distributed, or set WORLD_SIZE")
    return dist.get_world_size()
