"""Newton-Schulz iterations on Gram matrices: most of their products are only of the short side, and symmetric.

An iteration X -> P X, with P = a I + b G + c G^2 and G = X X^T, takes G to P G P. So some of them need X at their beginning and
their end only: P of each is multiplied into Q, and X -> Q X. All of these are polynomials of one symmetric matrix, so their products
are symmetric. In half precision the error of G grows with each iteration, so after each three of them it is made again
from X. fp16 has the precision that this needs, and its range is enough for matrices of norm 1: results are closer to those of exact
arithmetic than iterations on X in bf16.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from megatron.core.distributed.fsdp.config.torch_versions import HAS_TRITON
from megatron.core.distributed.fsdp.matrices.newton_schulz import Coefficients, NewtonSchulz

# Matrices are divided by their norm and multiplied by this, since the elements of large ones are small for fp16.
SCALE = 8.0
# Iterations between two products with X.
_SEGMENT = 3
# Of shorter sides products do not fill a device.
SHORTEST = 512
# Offsets of matrices are multiples of this many elements: the kernels' ``UNIT``.
ALIGNMENT = 64
_TILE = 128


class PlacedMatrix(NamedTuple):
    """A matrix among others in a flat buffer: blocks of ``height`` rows from row ``first`` of each ``period`` rows of what begins at ``offset``."""

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


@dataclass(frozen=True)
class Tiling:
    """How a device multiplies: sizes of tiles, and options of the launch."""

    rows: int = 128
    columns: int = 128
    depth: int = 64
    num_warps: int = 4
    num_stages: int = 3


TILING = Tiling()


def serves_device(iterate: NewtonSchulz, device: torch.device) -> bool:
    """Return whether these iterations may be on Gram matrices there: they are of fifth order, and there are kernels."""
    if device.type == "cuda":
        can_run = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        can_run = os.environ.get("TRITON_INTERPRET") == "1"
    of_fifth_order = all(c != 0.0 for *_, c in iterate.coefficients)
    return can_run and iterate.may_use_grams and of_fifth_order and HAS_TRITON


def serves_shape(matrix: PlacedMatrix) -> bool:
    """Return whether a matrix of this shape is iterated on by its Gram matrix where ``serves_device``."""
    is_aligned = matrix.short % _TILE == 0 and matrix.long % ALIGNMENT == 0
    return is_aligned and matrix.short >= SHORTEST


class _Product(NamedTuple):
    """A launch of symmetric products: alpha L R^T + beta G + gamma I."""

    from_x: bool
    tiles: torch.Tensor
    alpha: float
    beta: float
    gamma: float


class _Apply(NamedTuple):
    """X -> Q X."""

    slot: int
    is_last: bool


# Slots of matrices [short, short]: G, P, P G, and Q as it was and as it becomes.
_G, _P, _H, _Q, _R = range(5)


class GramIteration:
    """Newton-Schulz iterations on some matrices with equally long short sides, at their places in a flat buffer.

    Args:
        places: of the matrices; offsets must be multiples of 64.
        iterate: the iterations.
        device: where the tables of tiles are made.
        tiling: how products are cut.
    """

    def __init__(
        self, places: Sequence[PlacedMatrix], iterate: NewtonSchulz, device: torch.device, *, tiling: Tiling = TILING
    ) -> None:
        self.places, self._device, self._tiling, self._eps = list(places), device, tiling, iterate.eps
        self._size = places[0].short
        self._begins = [0, *accumulate(place.numel for place in places)]
        self._tables: dict[tuple[Any, ...], torch.Tensor] = {}
        from megatron.core.distributed.fsdp.matrices import gram_kernels  # it imports Triton

        self._kernels = gram_kernels
        self._steps = self._plan(iterate.coefficients)
        self._lay_out_norms()

    @property
    def scratch_numel(self) -> int:
        """Elements of memory that ``run`` needs."""
        return 2 * self._begins[-1] + 5 * len(self.places) * self._size**2

    def run(self, whole: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor) -> None:
        """Orthogonalize the matrices that lie in ``whole`` (fp32) to the same places of ``out`` (fp16, as ``scratch``)."""
        numel = self._begins[-1]
        x, spare, work = scratch[: self.scratch_numel].split([numel, numel, self.scratch_numel - 2 * numel])
        squares = work.view(5, len(self.places), self._size, self._size)
        self._divide(whole, x)
        for step in self._steps:
            if isinstance(step, _Product):
                self._multiply(step, x if step.from_x else work, work)
                continue
            factors = squares[step.slot].unbind()
            if step.is_last:
                self._finish(factors, x, out)
                return
            for q, old, new in zip(factors, self._wide(x), self._wide(spare), strict=True):
                torch.mm(q, old, out=new)
            x, spare = spare, x

    def _wide(self, flat: torch.Tensor) -> list[torch.Tensor]:
        parts = flat.split([end - begin for begin, end in zip(self._begins, self._begins[1:], strict=False)])
        return [part.view(self._size, -1) for part in parts]

    def _finish(self, factors: Sequence[torch.Tensor], x: torch.Tensor, out: torch.Tensor) -> None:
        for q, wide, place in zip(factors, self._wide(x), self.places, strict=True):
            view = place.view(out)
            # Q is symmetric: (Q X)^T = X^T Q.
            left, right = (wide.mT, q) if place.is_tall else (q, wide)
            if view.size(0) == 1:
                torch.mm(left, right, out=view[0])
            else:
                view.copy_(torch.mm(left, right).view(view.shape))

    # ---- what is launched ---------------------------------------------------------------------------------------

    def _plan(self, coefficients: Sequence[Coefficients]) -> list[_Product | _Apply]:
        steps: list[_Product | _Apply] = []
        at, scale = 0, SCALE  # of X; G's is its square
        while at < len(coefficients):
            segment = coefficients[at : at + _SEGMENT]
            at += len(segment)
            steps.append(self._product([(None, None, _G)], long=True))
            q, spare = _Q, _R
            for number, (a, b, c) in enumerate(segment):
                is_first, is_last = number == 0, number == len(segment) - 1
                # The rest of the scale is removed when X is multiplied.
                unscale = 1.0 / scale if is_last and is_first else 1.0
                p = q if is_first else _P
                steps.append(
                    self._product(
                        [(_G, _G, p)],
                        adds=_G,
                        alpha=c * unscale / scale**4,
                        beta=b * unscale / scale**2,
                        gamma=a * unscale,
                    )
                )
                if is_last and not is_first:
                    steps.append(self._product([(p, q, spare)], alpha=1.0 / scale))
                    q, spare = spare, q
                elif not is_last:
                    more = [] if is_first else [(p, q, spare)]
                    steps.append(self._product([(p, _G, _H), *more]))
                    if more:
                        q, spare = spare, q
                    steps.append(self._product([(p, _H, _G)]))
            steps.append(_Apply(q, at >= len(coefficients)))
            scale = 1.0
        return steps

    def _product(
        self,
        slots: Sequence[tuple[int | None, int | None, int]],
        *,
        long: bool = False,
        adds: int | None = None,
        alpha: float = 1.0,
        beta: float = 0.0,
        gamma: float = 0.0,
    ) -> _Product:
        """Return a launch for all matrices: slots of L, R and the result; ``long``: L and R are X."""
        key = (*slots, adds)
        if key not in self._tables:
            self._tables[key] = self._tiles(slots, adds)
        return _Product(long, self._tables[key], alpha, beta, gamma)

    def _tiles(self, slots: Sequence[tuple[int | None, int | None, int]], adds: int | None) -> torch.Tensor:
        tiling, size = self._tiling, self._size
        inside = [
            (row, column)
            for row in range(size // tiling.rows)
            for column in range(size // tiling.columns)
            if column * tiling.columns < (row + 1) * tiling.rows
        ]
        square = size * size // ALIGNMENT

        def offset(slot: int | None, number: int) -> int:
            return self._begins[number] // ALIGNMENT if slot is None else (slot * len(self.places) + number) * square

        found: list[tuple[int, ...]] = []
        for left, right, out in slots:
            for number, place in enumerate(self.places):
                length = (place.long if left is None else size) // ALIGNMENT
                added = 0 if adds is None else offset(adds, number)
                offsets = (offset(left, number), offset(right, number), added, offset(out, number))
                found += [(*tile, *offsets, length) for tile in inside]
        found.sort(key=lambda entry: -entry[-1])  # the longest first, so that none begins when all others end
        return torch.tensor(found, dtype=torch.int32).to(self._device)

    def _lay_out_norms(self) -> None:
        tiles: list[tuple[int, int, int]] = []
        bounds, shapes = [0], []
        for number, place in enumerate(self.places):
            # Rows of a tall matrix become columns, so both are in units, which are also the sides of the tiles.
            rows, columns = place.rows // ALIGNMENT, place.columns // ALIGNMENT
            tiles += [(number, row, column) for row in range(rows) for column in range(columns)]
            bounds.append(len(tiles))
            blocks = (place.period, place.first, place.height)
            begin = self._begins[number] // ALIGNMENT
            shapes.append((place.offset // ALIGNMENT, rows, columns, *blocks, begin, int(place.is_tall)))
        tables = (torch.tensor(table, dtype=torch.int32).to(self._device) for table in (tiles, shapes, bounds))
        self._norm_tiles, self._shapes, self._bounds = tables

    # ---- launches -----------------------------------------------------------------------------------------------

    def _divide(self, whole: torch.Tensor, x: torch.Tensor) -> None:
        kernels, num_tiles = self._kernels, self._norm_tiles.shape[0]
        sums = whole.new_empty(num_tiles)
        norms = whole.new_empty(len(self.places))
        tile = (kernels.NORM_ROWS, kernels.NORM_COLUMNS)
        kernels.square_sums_kernel[(num_tiles,)](whole, self._norm_tiles, self._shapes, sums, *tile)
        kernels.norms_kernel[(len(self.places),)](sums, self._bounds, norms, self._eps, SCALE, 1024)
        kernels.divide_kernel[(num_tiles,)](whole, self._norm_tiles, self._shapes, norms, x, *tile)

    def _multiply(self, product: _Product, factors: torch.Tensor, work: torch.Tensor) -> None:
        tiling = self._tiling
        self._kernels.symmetric_product_kernel[(product.tiles.shape[0],)](
            factors,
            work,
            product.tiles,
            product.alpha,
            product.beta,
            product.gamma,
            self._size,
            product.gamma != 0.0,
            tiling.rows,
            tiling.columns,
            tiling.depth,
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )
