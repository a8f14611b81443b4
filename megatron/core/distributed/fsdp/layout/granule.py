"""How finely ranks may cut a tensor.

**Row**, everywhere in the engine, means one entry of dim 0 with all its elements (one element of a vector). A tensor
[R, C, ...] with ``Granule.row_parts(p)`` is laid out as its view [R * p, C / p, ...], and its rows are then the rows of
that view.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Granule:
    """The smallest piece of a tensor that the boundary between two ranks may not cut.

    Make one with ``row``, ``row_parts``, ``rows`` or ``whole``. A parameter asks for one by its attribute
    ``fsdp_granule``, set before ``fully_shard``, the same on all ranks. Without it the engine takes rows, or parts of rows
    where rows would cost too much padding (``PaddingPolicy``).

    Args:
        num_rows: rows in a granule; the last granule of a tensor may have fewer. None: all of them.
        num_parts: granules that each row is cut into, equal parts along dim 1.

    Raises:
        TypeError: a number is no integer.
        ValueError: a number is below 1, or rows are both joined and cut.
    """

    num_rows: int | None = 1
    num_parts: int = 1

    def __post_init__(self) -> None:
        for number in (self.num_parts, 1 if self.num_rows is None else self.num_rows):
            # ``True`` is an int, and 128.0 would make offsets floats.
            if not isinstance(number, int) or isinstance(number, bool):
                raise TypeError(
                    f"a granule must have whole numbers of rows and parts, got {number!r}; try Granule.rows(128)"
                )
        if (self.num_rows is not None and self.num_rows < 1) or self.num_parts < 1:
            raise ValueError(
                f"a granule must have 1 row or part of a row at least, got {self.num_rows} rows and {self.num_parts} parts; "
                "try Granule.rows(128), Granule.row_parts(2) or Granule.whole()"
            )
        # Half of three rows is no slice of dim 1, which views with ``row_parts`` need.
        if self.num_parts > 1 and self.num_rows != 1:
            raise ValueError(
                f"a granule is several rows or a part of one, got {self.num_rows} rows and {self.num_parts} parts of each"
            )

    @staticmethod
    def row() -> Granule:
        """Return a granule of one row."""
        return Granule()

    @staticmethod
    def row_parts(num_parts: int) -> Granule:
        """Return a granule that is one of ``num_parts`` equal parts of a row along dim 1."""
        return Granule(num_parts=num_parts)

    @staticmethod
    def rows(num_rows: int) -> Granule:
        """Return a granule of ``num_rows`` rows, for what is computed on blocks of rows (scales of quantised weights)."""
        if num_rows is None:
            raise TypeError("Granule.rows must have a number of rows, got None; Granule.whole() is the whole tensor")
        return Granule(num_rows)

    @staticmethod
    def whole() -> Granule:
        """Return the granule of a tensor that lies on one rank, for what needs the whole matrix (Muon)."""
        return Granule(None)

    def __str__(self) -> str:
        if self.num_rows is None:
            return "whole tensor"
        if self.num_rows > 1:
            return f"{self.num_rows} rows"
        return "row" if self.num_parts == 1 else f"1/{self.num_parts} row"

    def numel(self, shape: Sequence[int]) -> int:
        """Return the elements of a granule of a tensor of this shape; 0 where a dim after the first is 0."""
        num_rows = shape[0] if shape else 1
        at_most = num_rows if self.num_rows is None else min(self.num_rows, num_rows)
        # A tensor without rows has a granule of one row too: cuts are multiples of it.
        return max(at_most, 1) * math.prod(shape[1:]) // self.num_parts


def check_row_parts(shape: Sequence[int], num_parts: int, name: str = "row_parts") -> None:
    """Check that rows of a tensor of this shape can be cut into so many equal parts along dim 1.

    Args:
        name: of the number, for errors.

    Raises:
        ValueError: they cannot.
    """
    if num_parts == 1:
        return
    if num_parts < 1 or len(shape) < 2 or shape[1] == 0 or shape[1] % num_parts != 0:
        raise ValueError(
            f"{name} must divide dim 1 of the tensor, got {num_parts} for shape {list(shape)}; take a divisor of it"
        )


def granule_of(parameter: torch.Tensor, name: str) -> Granule | None:
    """Return the granule that a parameter asks for by its attribute ``fsdp_granule``; None where it leaves the choice.

    Raises:
        TypeError: the attribute is no ``Granule``.
        ValueError: the parameter cannot be cut so.
    """
    # Users set it: a wrong one must be found here, by the parameter's name, and not in the layout.
    granule: object = getattr(parameter, "fsdp_granule", None)
    if granule is None:
        return None
    if not isinstance(granule, Granule):
        raise TypeError(f"fsdp_granule of parameter {name} must be a Granule, got {granule!r}; try Granule.rows(128)")
    check_row_parts(parameter.shape, granule.num_parts, f"fsdp_granule of parameter {name}: row_parts")
    return granule
