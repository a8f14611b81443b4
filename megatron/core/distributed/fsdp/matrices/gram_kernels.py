"""Triton kernels of ``GramIteration``: products that are symmetric, and how matrices are divided by their norms.

A symmetric product is computed on and below its diagonal, in tiles, and written twice. What one launch does is a table of tiles, so
that matrices of several shapes fill the device together.
"""

from __future__ import annotations

from megatron.core.extensions.triton_language import tl, triton

# Offsets and lengths in tables are in units of so many elements: wide loads need no checks, and 32 bits are enough.
UNIT = 64
_UNIT = tl.constexpr(UNIT)
# Tiles of matrices that are divided by their norms.
NORM_ROWS, NORM_COLUMNS = 64, 64


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def symmetric_product_kernel(  # type: ignore[no-untyped-def]
    factors,
    work,
    tiles,
    alpha,
    beta,
    gamma,
    SIZE: tl.constexpr,
    ADDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Write alpha L R^T + beta G + gamma I, where L R^T [SIZE, SIZE] is symmetric; L and R [SIZE, K] are in ``factors``.

    The result and G [SIZE, SIZE] are in ``work``. One program for each row of ``tiles`` [N, 7]: row and column of the tile, offsets of L, R, G
    and of the result, and K, from the third on in units of ``UNIT``. ``ADDS``: G and I are added.
    """
    entry = tiles + tl.program_id(0) * 7
    first_row = tl.load(entry) * ROWS
    first_column = tl.load(entry + 1) * COLUMNS
    left = factors + tl.load(entry + 2).to(tl.int64) * _UNIT
    right = factors + tl.load(entry + 3).to(tl.int64) * _UNIT
    length = tl.load(entry + 6) * _UNIT
    rows = first_row + tl.arange(0, ROWS)
    columns = first_column + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    left += rows[:, None] * length + depth[None, :]
    right += columns[None, :] * length + depth[:, None]
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for _ in range(0, length, DEPTH):
        total = tl.dot(tl.load(left), tl.load(right), total)
        left += DEPTH
        right += DEPTH
    total = total * alpha
    out = work + tl.load(entry + 5).to(tl.int64) * _UNIT
    here = rows[:, None] * SIZE + columns[None, :]
    there = columns[:, None] * SIZE + rows[None, :]
    is_below = first_row >= first_column + COLUMNS
    if ADDS:
        total += beta * tl.load(work + tl.load(entry + 4).to(tl.int64) * _UNIT + here).to(tl.float32)
        total += tl.where(rows[:, None] == columns[None, :], gamma, 0.0)
    result = total.to(work.dtype.element_ty)
    if is_below:
        tl.store(out + here, result)
        tl.store(out + there, tl.trans(result))
    else:
        # Each element is written once, so that the result is symmetric to the bit.
        tl.store(out + here, result, mask=rows[:, None] >= columns[None, :])
        tl.store(out + there, tl.trans(result), mask=columns[:, None] < rows[None, :])


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _places(entry, shapes, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a tile's rows and columns, its offsets among the whole matrices, and the row of ``shapes`` of its matrix."""
    shape = shapes + tl.load(entry) * 8
    rows = tl.load(entry + 1) * ROWS + tl.arange(0, ROWS)
    columns = tl.load(entry + 2) * COLUMNS + tl.arange(0, COLUMNS)
    height = tl.load(shape + 5)
    lines = rows // height * tl.load(shape + 3) + tl.load(shape + 4) + rows % height
    width = tl.load(shape + 2) * _UNIT
    offsets = tl.load(shape).to(tl.int64) * _UNIT + lines[:, None].to(tl.int64) * width + columns[None, :]
    return rows, columns, offsets, shape


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def square_sums_kernel(  # type: ignore[no-untyped-def]
    whole, tiles, shapes, sums, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Write the sum of squares of each tile to ``sums`` [N].

    ``tiles`` [N, 3]: matrix, row and column of the tile. ``shapes`` [matrices, 8]: offset, rows, columns, and where rows are (period, first,
    height as in ``_Block``); then the offset of the result, and whether that is transposed. Offsets and columns are in units of ``UNIT``.
    """
    _, _, offsets, _ = _places(tiles + tl.program_id(0) * 3, shapes, ROWS, COLUMNS)
    x = tl.load(whole + offsets)
    tl.store(sums + tl.program_id(0), tl.sum(tl.sum(x * x, axis=1), axis=0))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def norms_kernel(sums, bounds, norms, eps, scale, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the root of ``sums`` [bounds[z], bounds[z + 1]), at least eps, over the scale, to ``norms``; one program for each z."""
    at = tl.load(bounds + tl.program_id(0))
    end = tl.load(bounds + tl.program_id(0) + 1)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for begin in range(at, end, BLOCK):
        places = begin + tl.arange(0, BLOCK)
        total += tl.load(sums + places, mask=places < end, other=0.0)
    norm = tl.sqrt_rn(tl.sum(total, axis=0))
    tl.store(norms + tl.program_id(0), tl.maximum(norm, eps) / scale)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def divide_kernel(  # type: ignore[no-untyped-def]
    whole, tiles, shapes, norms, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Divide matrices by their ``norms``, and write them, wide, to ``out``; ``tiles`` and ``shapes`` as in ``square_sums_kernel``."""
    entry = tiles + tl.program_id(0) * 3
    rows, columns, offsets, shape = _places(entry, shapes, ROWS, COLUMNS)
    x = tl.load(whole + offsets) / tl.load(norms + tl.load(entry))
    result = x.to(out.dtype.element_ty)
    out += tl.load(shape + 6).to(tl.int64) * _UNIT
    if tl.load(shape + 7) != 0:
        height = tl.load(shape + 1) * _UNIT
        tl.store(out + columns[:, None].to(tl.int64) * height + rows[None, :], tl.trans(result))
    else:
        width = tl.load(shape + 2) * _UNIT
        tl.store(out + rows[:, None].to(tl.int64) * width + columns[None, :], result)
