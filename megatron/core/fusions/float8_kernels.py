"""Gated activations and their backward, as Triton kernels that write FP8 bytes and transposed bytes, and read each input once.

The scale is given, as with delayed scaling: where it follows from the result itself, that must be in memory first.

[Note: kept input] What backward needs of the input may be kept in E4M3, each ``COLUMNS`` numbers of a row with their own
scale. Its rounding (2^-4 at most) is small beside that of the gradient, which is rounded to E5M2 (2^-3) afterwards.

[Note: rounded twice] Where two bytes that were rounded together go into words of the rows and into words of the columns, the
assembler of Triton 3.6 (ptxas for sm_90) reads the register for the columns before it is written: on an H200 half of the
transposed bytes were of no element. So numbers are rounded again for the columns, from products with a scale that is
loaded again; the compiler would make one of two equal products.
"""

from __future__ import annotations

import os

from megatron.core.extensions.triton_language import tl, triton
from megatron.core.fusions.backward_kernels import activate

# A tile's rows and columns, which are bytes next to each other in the transposed result and in the result. Threads load
# and store words of 16 bytes, and few enough of them for four blocks of an SM's registers.
ROWS = 64
COLUMNS = 64
NUM_WARPS = 8
# Triton's interpreter loses the carry where it rounds to the nearest number; in tests it cuts off.
ROUNDING = tl.constexpr("rtz" if os.environ.get("TRITON_INTERPRET") == "1" else "rtne")


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def gated_kernel(  # type: ignore[no-untyped-def]
    x,
    scale,
    amax,
    out,
    transposed,
    kept,
    kept_inverse,
    num_rows,
    width,
    IS_SILU: tl.constexpr,
    LARGEST: tl.constexpr,
    WRITES_ROWS: tl.constexpr,
    WRITES_COLUMNS: tl.constexpr,
    KEEPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write silu(gate) * up, or gelu(gate) * up in its tanh form, of ``x`` [rows, 2 * width], times ``scale``.

    ``amax`` is raised to the largest absolute value. ``out`` is [rows, width], ``transposed`` [width, rows]; ``kept``
    [rows, 2 * width] and ``kept_inverse`` [rows, 2 * tiles] are those of [Note: kept input].
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    at = row[:, None] * (2 * width) + column[None, :]
    gate = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + at + width, mask=inside, other=0.0).to(tl.float32)
    if KEEPS:
        kept_inverse += row * (2 * tl.num_programs(0)) + tl.program_id(0)
        _keep(gate, kept + at, kept_inverse, inside, row < num_rows)
        _keep(up, kept + at + width, kept_inverse + tl.num_programs(0), inside, row < num_rows)
    activated, _ = activate(gate, IS_SILU)
    y = activated * up
    tl.atomic_max(amax, tl.max(tl.abs(y)))
    if WRITES_ROWS:
        byte = _rounded(y, scale, LARGEST, out)
        tl.store(out + row[:, None] * width + column[None, :], byte, mask=inside)
    if WRITES_COLUMNS:
        at = column.to(tl.int64)[:, None] * num_rows + row[None, :]
        byte = _rounded(tl.trans(y), scale, LARGEST, out)  # [Note: rounded twice]
        tl.store(transposed + at, byte, mask=tl.trans(inside))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def gated_backward_kernel(  # type: ignore[no-untyped-def]
    grad,
    x,
    x_inverse,
    scale,
    amax,
    out,
    transposed,
    num_rows,
    width,
    IS_SILU: tl.constexpr,
    LARGEST: tl.constexpr,
    WRITES_COLUMNS: tl.constexpr,
    IS_KEPT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the gradient of ``x`` [rows, 2 * width] from that of ``gated_kernel``'s result [rows, width], times ``scale``.

    ``amax`` is raised to the largest absolute value. ``out`` is [rows, 2 * width], ``transposed`` [2 * width, rows].
    IS_KEPT: ``x`` and ``x_inverse`` are those of [Note: kept input].
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    at = row[:, None] * (2 * width) + column[None, :]
    wide = tl.load(grad + row[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + at + width, mask=inside, other=0.0).to(tl.float32)
    if IS_KEPT:
        x_inverse += row * (2 * tl.num_programs(0)) + tl.program_id(0)
        gate *= tl.load(x_inverse, mask=row < num_rows, other=0.0)[:, None]
        up *= tl.load(x_inverse + tl.num_programs(0), mask=row < num_rows, other=0.0)[:, None]
    activated, slope = activate(gate, IS_SILU)
    grad_gate = wide * up * slope
    grad_up = wide * activated
    tl.atomic_max(amax, tl.maximum(tl.max(tl.abs(grad_gate)), tl.max(tl.abs(grad_up))))
    tl.store(out + at, _rounded(grad_gate, scale, LARGEST, out), mask=inside)
    tl.store(out + at + width, _rounded(grad_up, scale, LARGEST, out), mask=inside)
    if WRITES_COLUMNS:
        column = column.to(tl.int64)[:, None]
        inside = tl.trans(inside)
        of_gate = _rounded(tl.trans(grad_gate), scale, LARGEST, out)  # [Note: rounded twice]
        of_up = _rounded(tl.trans(grad_up), scale, LARGEST, out)
        tl.store(transposed + column * num_rows + row[None, :], of_gate, mask=inside)
        tl.store(transposed + (column + width) * num_rows + row[None, :], of_up, mask=inside)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _rounded(y, scale, LARGEST: tl.constexpr, out):  # type: ignore[no-untyped-def]
    """Scale and round to the format of ``out``, to its largest number what is beyond that; NaN stays."""
    y *= tl.load(scale, volatile=True)
    y = tl.where(y > LARGEST, LARGEST, y)
    y = tl.where(y < -LARGEST, -LARGEST, y)
    return y.to(out.dtype.element_ty, fp_downcast_rounding=ROUNDING)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _keep(values, kept, inverse, inside, rows_inside):  # type: ignore[no-untyped-def]
    """Write the rows of a tile in E4M3, each scaled by its largest absolute value."""
    largest = tl.maximum(tl.max(tl.abs(values), axis=1), 1e-30)
    byte = (values * (448.0 / largest)[:, None]).to(kept.dtype.element_ty, fp_downcast_rounding=ROUNDING)
    tl.store(kept, byte, mask=inside)
    tl.store(inverse, largest / 448.0, mask=rows_inside)
