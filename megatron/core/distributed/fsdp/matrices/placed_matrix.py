"""A matrix among others in a flat buffer."""

from __future__ import annotations

from typing import NamedTuple

import torch


class PlacedMatrix(NamedTuple):
    """Blocks of ``height`` rows from row ``first`` of each ``period`` rows of what begins at ``offset``."""

    offset: int
    num_repeats: int
    period: int
    first: int
    height: int
    columns: int

    @property
    def rows(self) -> int:
        return self.num_repeats * self.height

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    @property
    def short(self) -> int:
        return min(self.rows, self.columns)

    @property
    def long(self) -> int:
        return max(self.rows, self.columns)

    @property
    def is_tall(self) -> bool:
        return self.rows > self.columns

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the matrix [repeats, height, columns] in the flat buffer."""
        numel = self.num_repeats * self.period * self.columns
        whole = flat[self.offset : self.offset + numel].view(self.num_repeats, self.period, self.columns)
        return whole[:, self.first : self.first + self.height]
