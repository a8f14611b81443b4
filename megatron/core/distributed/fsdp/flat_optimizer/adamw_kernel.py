"""AdamW on flat shards as two Triton kernels. ``adamw_update`` imports this module where Triton is installed.

Each product and sum is rounded by itself (the launcher disables fused multiply-add), so an element's result does not
depend on its block, the mask or the dtypes that the kernel was compiled for.
"""

from __future__ import annotations

from megatron.core.distributed.fsdp.codec.float8 import E4M3_MAX
from megatron.core.distributed.fsdp.codec.float8_kernel import from_e4m3, to_bf16, to_e4m3
from megatron.core.distributed.fsdp.flat_optimizer import moments
from megatron.core.extensions.triton_language import tl, triton

# Elements of one program: 8 for each of 128 threads, so that bf16 is read in words of 16 bytes.
BLOCK_NUMEL = moments.BLOCK_NUMEL
NUM_WARPS = 4
# Columns of the coefficients, in the order of hyperparameter_table.COLUMNS.
NUM_COLUMNS = tl.constexpr(9)
# Numbers of an entry of the table of blocks, and of a weight's place in the scales: float8.SCALE_ALIGNMENT.
ENTRY = tl.constexpr(6)
SCALE_ALIGNMENT = tl.constexpr(64)
LARGEST_MOMENT = tl.constexpr(E4M3_MAX)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def coefficients_kernel(  # type: ignore[no-untyped-def]
    hyperparameters,
    param_group,
    steps,
    advances,
    grad_factor,
    found_inf,
    coefficients,
    NUM_ROWS: tl.constexpr,
    MAY_SKIP: tl.constexpr,
):
    """Compute ``AdamWUpdate.write_coefficients`` in one program; ``NUM_ROWS`` is a power of two.

    ``MAY_SKIP``: where ``found_inf`` is not 0, no step is counted, and ``update_kernel`` writes nothing.
    """
    table_rows = tl.arange(0, NUM_ROWS)
    group = hyperparameters + tl.load(param_group + table_rows) * 5
    lr = tl.load(group)
    weight_decay = tl.load(group + 1)
    beta1 = tl.load(group + 2)
    beta2 = tl.load(group + 3)
    eps = tl.load(group + 4)
    skips = tl.zeros([NUM_ROWS], dtype=tl.float32)
    if MAY_SKIP:
        skips = tl.where(tl.load(found_inf + table_rows * 0) != 0.0, 1.0, 0.0)
    step = tl.load(steps + table_rows) + tl.load(advances + table_rows) * (1.0 - skips)
    tl.store(steps + table_rows, step)
    # Coefficients of a row that has taken no step are not used; step 1 avoids a division by zero.
    step = tl.maximum(step.to(tl.float64), 1.0)
    correction1 = 1.0 - tl.exp(step * tl.log(beta1))
    correction2 = 1.0 - tl.exp(step * tl.log(beta2))
    out = coefficients + table_rows * NUM_COLUMNS
    tl.store(out, (1.0 - lr * weight_decay).to(tl.float32))
    tl.store(out + 1, (1.0 - beta1).to(tl.float32))
    tl.store(out + 2, beta2.to(tl.float32))
    tl.store(out + 3, (1.0 - beta2).to(tl.float32))
    tl.store(out + 4, (-(lr / correction1)).to(tl.float32))
    tl.store(out + 5, tl.sqrt(correction2).to(tl.float32))
    tl.store(out + 6, eps.to(tl.float32))
    tl.store(out + 7, tl.load(grad_factor + table_rows * 0))
    tl.store(out + 8, skips)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def update_kernel(  # type: ignore[no-untyped-def]
    main,
    grad,
    exp_avg,
    exp_avg_sq,
    exp_avg_scales,
    exp_avg_sq_scales,
    remainder,
    model,
    scale,
    amax,
    blocks,
    coefficients,
    TOP: tl.constexpr,
    TOP_OF_SQUARES: tl.constexpr,
    SMALLEST_SQUARE: tl.constexpr,
    LEAST_EXPONENT: tl.constexpr,
    KEEPS_REMAINDER: tl.constexpr,
    WRITES_MODEL: tl.constexpr,
    MEASURES: tl.constexpr,
    WRITES_BYTES: tl.constexpr,
    ROUNDS: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update an ``adamw_update.FlatShard`` with one program for each row of ``blocks`` [B, 6].

    ``TOP``, ``TOP_OF_SQUARES``, ``SMALLEST_SQUARE``: ``moments.ScaledFormat`` of the moments; 0 where they have no scales.
    ``MEASURES``: raise ``amax`` of the weights to their largest absolute values (NaN counts as infinite). ``WRITES_BYTES``: write
    them with their ``scale`` to ``model``, after rounding to bf16 if ``ROUNDS``.
    """
    entry = blocks + tl.program_id(0) * ENTRY
    at = tl.load(entry).to(tl.int64) * BLOCK
    first = tl.load(entry + 1)
    last = tl.load(entry + 2)
    own = coefficients + tl.load(entry + 3) * NUM_COLUMNS
    # A step that is skipped has no elements.
    last = tl.where(tl.load(own + 8) != 0.0, first, last)
    weight = tl.load(entry + 4) * SCALE_ALIGNMENT
    is_taken = first < last
    scale_m = exp_avg_scales + tl.load(entry + 5)
    scale_v = exp_avg_sq_scales + tl.load(entry + 5)
    inside = tl.arange(0, BLOCK)
    offsets = at + inside
    if last - first == BLOCK:
        m = _read_moment(exp_avg, scale_m, offsets, None, TOP)
        v = _read_moment(exp_avg_sq, scale_v, offsets, None, TOP_OF_SQUARES)
        w, m, v = _update(main, grad, m, v, remainder, own, offsets, None, KEEPS_REMAINDER)
        _write_moment(exp_avg, scale_m, m, offsets, None, is_taken, TOP, 0.0, LEAST_EXPONENT)
        _write_moment(exp_avg_sq, scale_v, v, offsets, None, is_taken, TOP_OF_SQUARES, SMALLEST_SQUARE, LEAST_EXPONENT)
        w = _store(main, remainder, model, w, offsets, None, KEEPS_REMAINDER, WRITES_MODEL)
        if MEASURES:
            _encode(model, scale + weight, amax + weight, w, offsets, None, WRITES_BYTES, ROUNDS, LARGEST)
    else:
        mask = (inside >= first) & (inside < last)
        m = _read_moment(exp_avg, scale_m, offsets, mask, TOP)
        v = _read_moment(exp_avg_sq, scale_v, offsets, mask, TOP_OF_SQUARES)
        w, m, v = _update(main, grad, m, v, remainder, own, offsets, mask, KEEPS_REMAINDER)
        _write_moment(exp_avg, scale_m, m, offsets, mask, is_taken, TOP, 0.0, LEAST_EXPONENT)
        _write_moment(exp_avg_sq, scale_v, v, offsets, mask, is_taken, TOP_OF_SQUARES, SMALLEST_SQUARE, LEAST_EXPONENT)
        w = _store(main, remainder, model, w, offsets, mask, KEEPS_REMAINDER, WRITES_MODEL)
        if MEASURES:
            w = tl.where(mask, w, 0.0)
            _encode(model, scale + weight, amax + weight, w, offsets, mask, WRITES_BYTES, ROUNDS, LARGEST)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _update(  # type: ignore[no-untyped-def]
    main, grad, m, v, remainder, coefficients, offsets, mask, KEEPS_REMAINDER: tl.constexpr
):
    """Return the new main weights and the new moments of ``m`` and ``v``, all in fp32."""
    g = tl.load(grad + offsets, mask=mask).to(tl.float32) * tl.load(coefficients + 7)
    w = tl.load(main + offsets, mask=mask)
    if KEEPS_REMAINDER:
        low = tl.load(remainder + offsets, mask=mask).to(tl.int32)
        w = ((w.to(tl.int16, bitcast=True).to(tl.int32) << 16) + low).to(tl.float32, bitcast=True)
    else:
        w = w.to(tl.float32)
    m = m + (g - m) * tl.load(coefficients + 1)
    v = v * tl.load(coefficients + 2) + g * tl.load(coefficients + 3) * g
    denominator = tl.div_rn(tl.sqrt_rn(v), tl.load(coefficients + 5)) + tl.load(coefficients + 6)
    w = w * tl.load(coefficients) + tl.div_rn(m * tl.load(coefficients + 4), denominator)
    return w, m, v


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _read_moment(stored, scale, offsets, mask, TOP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a moment in fp32: ``moments.read_moment``. ``scale`` is that of the program's elements, which are one piece."""
    values = tl.load(stored + offsets, mask=mask)
    if stored.dtype.element_ty == tl.uint8:
        values = from_e4m3(values)
    values = values.to(tl.float32)
    if TOP != 0:
        values = values * tl.load(scale)
    return values


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _write_moment(  # type: ignore[no-untyped-def]
    stored,
    scale,
    values,
    offsets,
    mask,
    is_taken,
    TOP: tl.constexpr,
    SMALLEST: tl.constexpr,
    LEAST_EXPONENT: tl.constexpr,
):
    """Round a moment and store it, with its scale: ``moments.write_moment``. ``is_taken`` is False in a step that is skipped."""
    if TOP != 0:
        size = tl.where(values == values, tl.abs(values), float("inf"))
        if mask is not None:
            size = tl.where(mask, size, 0.0)
        amax = tl.max(size, axis=0).to(tl.int32, bitcast=True)
        exponent = tl.maximum(((amax + 0x1FFFFF) >> 23) - TOP, LEAST_EXPONENT)
        tl.store(scale, (exponent << 23).to(tl.float32, bitcast=True), mask=is_taken)
        values = values * ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        if SMALLEST > 0.0:
            values = tl.where((values > 0.0) & (values < SMALLEST), SMALLEST, values)
    if stored.dtype.element_ty == tl.uint8:
        rounded = to_e4m3(values, LARGEST_MOMENT)
    elif stored.dtype.element_ty == tl.bfloat16:
        rounded = to_bf16(values).to(tl.bfloat16)
    else:
        rounded = values.to(stored.dtype.element_ty)
    tl.store(stored + offsets, rounded, mask=mask)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _store(  # type: ignore[no-untyped-def]
    main, remainder, model, w, offsets, mask, KEEPS_REMAINDER: tl.constexpr, WRITES_MODEL: tl.constexpr
):
    """Store main weights, and, in ``model``, their casts if ``WRITES_MODEL``; return them in fp32 as they are in ``main``."""
    if KEEPS_REMAINDER:
        # Devices write NaN as 0x7FFFFFFF, which would be rounded into the sign bit.
        bits = tl.where(w == w, w.to(tl.int32, bitcast=True), 0x7FC00000)
        high = (bits + 0x8000) >> 16
        low = bits - (high << 16)
        tl.store(remainder + offsets, low.to(tl.int16), mask=mask)
        rounded = high.to(tl.int16).to(tl.bfloat16, bitcast=True)
        tl.store(main + offsets, rounded, mask=mask)
        if WRITES_MODEL:
            tl.store(model + offsets, rounded, mask=mask)
        stored = (high << 16).to(tl.float32, bitcast=True)
    else:
        narrow = w.to(main.dtype.element_ty)
        tl.store(main + offsets, narrow, mask=mask)
        if WRITES_MODEL:
            tl.store(model + offsets, w.to(model.dtype.element_ty), mask=mask)
        stored = narrow.to(tl.float32)
    return stored


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _encode(  # type: ignore[no-untyped-def]
    target, scale, amax, w, offsets, mask, WRITES: tl.constexpr, ROUNDS: tl.constexpr, LARGEST: tl.constexpr
):
    """Raise ``amax`` to the largest absolute value of ``w``, and write its bytes if ``WRITES``."""
    found = tl.max(tl.where(w == w, tl.abs(w), float("inf")), axis=0)
    # Nearly all programs find nothing larger, and need not queue for the one address. What is read may be old: it only grows.
    tl.atomic_max(amax, found, mask=found > tl.load(amax))
    if WRITES:
        if ROUNDS:
            w = to_bf16(w)
        tl.store(target + offsets, to_e4m3(w * tl.load(scale), LARGEST), mask=mask)
