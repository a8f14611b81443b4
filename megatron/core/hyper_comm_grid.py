"""A grid of ranks with named axes, and process groups over any of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from numbers import Integral
from typing import Any

import numpy as np
import torch.distributed as dist

_BASE = "base"


@dataclass(frozen=True)
class _View:
    """A shape of the grid: the length of each axis, their names, and the axes that it shares with the grid's own shape."""

    name: str
    shape: list[int]
    dim_names: list[str]
    shared_dims: list[str]

    def ordered(self, dims: str | Sequence[str]) -> list[str]:
        """Return names of axes, slowest first.

        Raises:
            ValueError: a name is not among them.
        """
        names = [dims] if isinstance(dims, str) else list(dims)
        if unknown := [name for name in names if name not in self.dim_names]:
            raise ValueError(
                f"axes must be among {self.dim_names}, got {unknown[0]!r}, which is not in view {self.name!r}"
            )
        return sorted(names, key=self.dim_names[::-1].index)

    def ranks(self, dims: str | Sequence[str], first: int) -> list[list[int]]:
        """Return the ranks of all groups over these axes, of a grid that begins at rank ``first``."""
        axes, slowest_first = self.ordered(dims), self.dim_names[::-1]
        cells = np.arange(first, first + prod(self.shape)).reshape(self.shape[::-1])
        cells = np.moveaxis(cells, [slowest_first.index(name) for name in axes], range(-len(axes), 0))
        ranks: list[list[int]] = cells.reshape(-1, prod(cells.shape[-len(axes) :])).tolist()
        return ranks


_Key = tuple[str, tuple[str, ...]]  # view, and names of axes, slowest first


class HyperCommGrid:
    """A grid of ranks, and the process groups that were made over its axes.

    The same ranks may have further shapes (``register_view``), such as that of experts beside that of dense layers.

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
        self._views = {_BASE: _View(_BASE, self.shape[:], self.dim_names[:], [])}
        self._groups: dict[_Key, Any] = {}

    def register_view(
        self, name: str, shape: list[int], dim_names: list[str], shared_dims: list[str] | None = None
    ) -> None:
        """Give the grid's ranks another shape, whose axes the other methods take with ``view=name``.

        Args:
            shape: the length of each axis; as many ranks as the grid has.
            dim_names: their names; neighbouring ranks differ on the first.
            shared_dims: axes of both shapes that have the same groups; groups over these alone are made once for both.

        Raises:
            ValueError: the name is taken; the shape does not fit the grid; a shared axis has other groups in the two shapes.

        Ranks: pure.
        """
        shared = list(shared_dims or ())
        own, base = _View(name, [*shape], [*dim_names], shared), self._views[_BASE]
        lengths = all(isinstance(length, Integral) and length > 0 for length in shape)
        unshared = [axis for axis in shared if axis not in base.dim_names or axis not in dim_names]
        for is_wrong, message in (
            (name in self._views, f"each view needs a name of its own, got {name!r}, which is already registered"),
            (len(shape) != len(dim_names), f"each axis needs one name, got shape {shape} and names {dim_names}"),
            (
                len({*dim_names}) < len(dim_names),
                f"each axis needs a name of its own, got duplicate dim_names {dim_names}",
            ),
            (not lengths, f"shape must be positive ints, got {shape}"),
            (
                lengths and prod(shape) != self.size,
                f"shape {shape} of view {name!r} must have {self.size} ranks, but has {prod(shape)}",
            ),
            (len({*shared}) < len(shared), f"each shared axis must be named once, got duplicate shared_dims {shared}"),
            (bool(unshared), f"shared axes must be among {base.dim_names} and {dim_names}, got {unshared}"),
        ):
            if is_wrong:
                raise ValueError(f"HyperCommGrid.register_view: {message}")
        for axes in (*([axis] for axis in shared), shared):
            here, there = (one.ranks(axes, self.rank_offset) if axes else [] for one in (own, base))
            if here != there:
                raise ValueError(
                    f"HyperCommGrid.register_view: the groups over the shared {', '.join(axes)} must be the grid's, {there}, got "
                    f"{here} in view {name!r}; leave out shared_dims, or order the axes as the grid does"
                )
        self._views[name] = own

    def create_pg(self, dims: str | list[str], *, view: str | None = None, **kwargs: Any) -> dist.ProcessGroup | None:
        """Make the groups over these axes, and return this rank's.

        Args:
            view: of which shape the axes are; None: the grid's own.
            kwargs: those of ``torch.distributed.new_subgroups_by_enumeration``.

        Raises:
            KeyError: it was made before, or there is no such view.

        Ranks: all of the world.
        """
        key = self._key(dims, view)
        if key in self._groups:
            raise KeyError(f"the process group over {_named(key)} has already been created; get_pg returns it")
        group: dist.ProcessGroup | None
        enumeration = self._views[key[0]].ranks(key[1], self.rank_offset)
        group, _ = dist.new_subgroups_by_enumeration(enumeration, backend=self.backend, **kwargs)
        self._groups[key] = group
        return group

    def get_pg(self, dims: str | list[str], *, view: str | None = None) -> dist.ProcessGroup:
        """Return this rank's group over these axes.

        Raises:
            KeyError: it was not made, or there is no such view.
        """
        key = self._key(dims, view)
        if key not in self._groups:
            raise KeyError(f"the process group over {_named(key)} hasn't been created; call create_pg first")
        group: dist.ProcessGroup = self._groups[key]
        return group

    def get_rank_enum(self, dims: str | list[str], *, view: str | None = None) -> list[list[int]]:
        """Return the ranks of all groups over these axes; within a group those that are first in ``dim_names`` run fastest."""
        return self._view(view).ranks(dims, self.rank_offset)

    def is_current_rank_in_grid(self) -> bool:
        """Return whether this rank is a cell of the grid."""
        return self.rank_offset <= dist.get_rank() < self.rank_offset + self.size

    def destroy(self) -> None:
        """Destroy the groups that were made, where this rank is in them."""
        for group in self._groups.values():
            if group is not None and group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)
        self._groups.clear()

    def _view(self, name: str | None) -> _View:
        if (name or _BASE) not in self._views:
            raise KeyError(
                f"view {name!r} is not registered, there are {sorted(self._views)}; call register_view first"
            )
        return self._views[name or _BASE]

    def _key(self, dims: str | list[str], view: str | None) -> _Key:
        """Return under which view and names, slowest first, a group is kept: groups over shared axes alone under the grid's."""
        own = self._view(view)
        axes = own.ordered(dims)
        if own.shared_dims and all(axis in own.shared_dims for axis in axes):
            own = self._views[_BASE]
            axes = own.ordered(axes)
        return own.name, tuple(axes)


def _named(key: _Key) -> str:
    return "-".join(key[1]) + (f" for view {key[0]!r}" if key[0] != _BASE else "")


def _world_size() -> int:
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    if not dist.is_initialized():
        raise RuntimeError("the number of ranks must be known: initialize torch.distributed, or set WORLD_SIZE")
    return dist.get_world_size()
