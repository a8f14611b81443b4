"""Muon's elementwise work on flat shards as Triton kernels, each of which reads and writes an element once.

Products and sums are rounded one by one (the launcher disables fused multiply-add). Tables are in units of ``ALIGN`` elements, so that
words are as wide as places of matrices allow.
"""

from __future__ import annotations

from megatron.core.distributed.fsdp.flat_optimizer.adamw_kernel import NUM_COLUMNS, _store, _update
from megatron.core.extensions.triton_language import tl, triton

BLOCK_NUMEL = 2048
NUM_WARPS = 4


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def momentum_kernel(  # type: ignore[no-untyped-def]
    grad,
    momentum,
    sent,
    factor,
    blocks,
    inertia,
    share,
    NESTEROV: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Bring the gradient, times ``factor``, into the momentum, and write what is orthogonalized to ``sent``.

    ``blocks`` [N, 4]: places in gradient, momentum and ``sent``, and elements. ``share`` is 1 - ``inertia``.
    """
    entry = blocks + tl.program_id(0) * 4
    inside = tl.arange(0, BLOCK)
    mask = inside < tl.load(entry + 3) * ALIGN
    g = tl.load(grad + tl.load(entry).to(tl.int64) * ALIGN + inside, mask=mask).to(tl.float32) * tl.load(factor)
    own = momentum + tl.load(entry + 1).to(tl.int64) * ALIGN + inside
    m = tl.load(own, mask=mask)
    m = m + (g - m) * share
    tl.store(own, m, mask=mask)
    if NESTEROV:
        m = m - (m - g) * share if inertia >= 0.5 else g + (m - g) * inertia
    tl.store(sent + tl.load(entry + 2).to(tl.int64) * ALIGN + inside, m, mask=mask)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def subtract_kernel(  # type: ignore[no-untyped-def]
    main,
    model,
    result,
    blocks,
    scales,
    decay,
    rate,
    extra,
    WRITES_MODEL: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add main weights times ``decay`` and scaled results times ``rate`` to main weights; write ``model`` if ``WRITES_MODEL``.

    ``blocks`` [N, 4]: places in main weight, momentum and ``result``, and elements; ``scales`` [N].
    """
    entry = blocks + tl.program_id(0) * 4
    inside = tl.arange(0, BLOCK)
    mask = inside < tl.load(entry + 3) * ALIGN
    at = tl.load(entry).to(tl.int64) * ALIGN + inside
    change = tl.load(result + tl.load(entry + 2).to(tl.int64) * ALIGN + inside, mask=mask).to(tl.float32)
    change = change * tl.load(scales + tl.program_id(0)) * extra
    w = tl.load(main + at, mask=mask).to(tl.float32)
    w = w + w * decay
    w = w + change * rate
    tl.store(main + at, w.to(main.dtype.element_ty), mask=mask)
    if WRITES_MODEL:
        tl.store(model + at, w.to(model.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def vectors_kernel(  # type: ignore[no-untyped-def]
    main,
    model,
    grad,
    exp_avg,
    exp_avg_sq,
    blocks,
    coefficients,
    WRITES_MODEL: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update by AdamW what lies elsewhere in its state. ``blocks`` [N, 4]: place in the main weight, in the state, table row, elements."""
    entry = blocks + tl.program_id(0) * 4
    inside = tl.arange(0, BLOCK)
    own = coefficients + tl.load(entry + 2) * NUM_COLUMNS
    numel = tl.where(tl.load(own + 8) != 0.0, 0, tl.load(entry + 3) * ALIGN)  # a step that is skipped has no elements
    mask = inside < numel
    at = tl.load(entry).to(tl.int64) * ALIGN + inside
    distance = (tl.load(entry + 1) - tl.load(entry)).to(tl.int64) * ALIGN
    m = tl.load(exp_avg + distance + at, mask=mask)
    v = tl.load(exp_avg_sq + distance + at, mask=mask)
    w, m, v = _update(main, grad, m, v, main, own, at, mask, False)
    tl.store(exp_avg + distance + at, m, mask=mask)
    tl.store(exp_avg_sq + distance + at, v, mask=mask)
    _store(main, main, model, w, at, mask, False, WRITES_MODEL)
