"""The Triton kernels compute what the torch operations compute.

tests/core/test_interpreted_kernels.py runs the check.
"""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch

from megatron.core.distributed.fsdp.codec.float8 import NAN_BYTE, SCALE_ALIGNMENT, UpdateEncoding
from megatron.core.distributed.fsdp.flat_optimizer import adamw_update
from megatron.core.distributed.fsdp.flat_optimizer.adamw_update import FlatShard
from megatron.core.distributed.fsdp.flat_optimizer.flat_runs import Run
from megatron.core.distributed.fsdp.flat_optimizer.hyperparameter_table import HyperparameterTable
from megatron.core.distributed.fsdp.flat_optimizer.moments import SCALED_FORMATS, make_scales, read_moment, write_moment

FP32, BF16 = torch.float32, torch.bfloat16
# (main weights, gradients, model weights, remainders)
KINDS = [
    (FP32, FP32, BF16, False),
    (FP32, BF16, None, False),
    (BF16, BF16, None, True),
    (BF16, FP32, BF16, True),
    (BF16, BF16, None, False),
    (FP32, torch.float16, torch.float16, False),
]
NUMEL = 3000
# A block of three runs, whole blocks, a gap, and an end inside of a block.
RUNS = (Run(3, 500, 0, 0, 0), Run(500, 700, 1, 2, 1), Run(700, 2100, 0, 1, 2), Run(2110, NUMEL - 7, 1, 2, 3))
# (main weights, nominal dtype, remainders, bytes): bytes beside main weights, or their maxima alone
ENCODED = [(FP32, BF16, False, True), (BF16, BF16, True, True), (FP32, FP32, False, True), (FP32, BF16, False, False)]
# Dtypes of the moments; uint8 is E4M3.
MOMENTS = [
    (BF16, BF16),
    (torch.float16, torch.float16),
    (torch.uint8, torch.uint8),
    (FP32, torch.uint8),
    (torch.uint8, BF16),
]


def _table(device: str = "cpu") -> HyperparameterTable:
    parameters = [torch.empty(0) for _ in range(3)]
    rates = [(0.01, 0.1, 0.9, 0.999, 1e-8), (0.02, 0.0, 0.0, 0.95, 1e-6)]
    param_groups = [
        {"params": members, "lr": lr, "weight_decay": decay, "betas": betas, "eps": eps}
        for members, (lr, decay, *betas, eps) in zip((parameters[::2], parameters[1:2]), rates, strict=True)
    ]
    groups: list[Any] = [SimpleNamespace(sharded=[parameter]) for parameter in parameters]
    table = HyperparameterTable(param_groups, groups, torch.device(device))
    table.set_steps(dict(zip(parameters, (0.0, 3.0, 7.0), strict=True)))
    table.set_active({0, 1})
    table.refresh(param_groups)
    return table


def check_interpreted() -> None:
    """Compare. Rounding differs: only torch fuses products with sums."""
    kernels, operations = (adamw_update.AdamWUpdate(uses_kernels=uses) for uses in (True, False))
    tables = [_table(), _table()]
    for update, table in zip((kernels, operations), tables, strict=True):
        update.write_coefficients(table, torch.tensor(0.5))
    assert tables[0].steps.tolist() == tables[1].steps.tolist() == [1.0, 4.0, 7.0, 0.0]
    torch.testing.assert_close(tables[0].coefficients, tables[1].coefficients, rtol=1e-7, atol=0.0)
    generator = torch.Generator().manual_seed(0)
    for main, nominal, keeps_remainder, writes in ENCODED:
        _compare_encodings(generator, tables[1], main, nominal, keeps_remainder=keeps_remainder, writes=writes)
    for main, grad, model, keeps_remainder in KINDS:
        grads = torch.randn(NUMEL, generator=generator).to(grad)
        grads[0] = grads[2105] = float("nan")  # in no run
        grads[100] = float("nan")
        tensors = {
            "main": torch.randn(NUMEL, generator=generator).to(main),
            "exp_avg": torch.randn(NUMEL, generator=generator) * 0.1,
            "exp_avg_sq": torch.rand(NUMEL, generator=generator) * 0.01,
        }
        if keeps_remainder:
            tensors["remainder"] = torch.randint(-(1 << 15), 1 << 15, (NUMEL,), generator=generator).short()
        if model is not None:
            tensors["model"] = torch.zeros(NUMEL, dtype=model)
        results = []
        for update in (kernels, operations):
            own: dict[str, Any] = {key: value.clone() for key, value in tensors.items()}
            own = {"remainder": None, "model": None, **own}
            shard = FlatShard(**own, runs=RUNS, blocks=update.blocks(RUNS, torch.device("cpu")))
            update.update(shard, grads, tables[1].coefficients)
            results.append(shard)
        _assert_close(results[0], results[1], keeps_remainder)
    compare_moments("cpu")
    _skip_a_step((kernels, operations))


def compare_moments(device: str) -> None:
    """Compare the kernel with the rounding that is written out here, in each pair of dtypes."""
    generator, table, update = (
        torch.Generator().manual_seed(1),
        _table(device),
        adamw_update.AdamWUpdate(uses_kernels=True),
    )
    update.write_coefficients(table, torch.tensor(0.5, device=device))
    for dtypes in MOMENTS:
        _compare_moments(generator, table, update, dtypes)


def _compare_moments(
    generator: torch.Generator,
    table: HyperparameterTable,
    update: adamw_update.AdamWUpdate,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> None:
    """A step from moments in fewer bits is one in fp32 from the same numbers, rounded at its end: to the last bit.

    Both steps are the kernel's. The rounding is written out here: to the nearest bf16 number, or by torch's own conversion.
    """
    decades = 10.0 ** torch.randint(-12, 3, (NUMEL,), generator=generator)
    values = [torch.randn(NUMEL, generator=generator) * decades, torch.rand(NUMEL, generator=generator) * decades**2]
    values[1][700:900] = 0.0
    grads = torch.randn(NUMEL, generator=generator) * decades
    grads[700:800] = 0.0
    device = table.device
    values, grads = [one.to(device) for one in values], grads.to(device)
    stored = [torch.zeros(NUMEL, dtype=dtype, device=device) for dtype in dtypes]
    scales = [make_scales(one, len(RUNS)) for one in stored]
    whole = [torch.zeros(NUMEL, device=device) for _ in dtypes]
    for at in range(2):
        for run in RUNS:
            own = slice(run.begin, run.end)
            write_moment(stored[at], scales[at], run, values[at][own], is_square=at == 1)
            whole[at][own] = read_moment(stored[at], scales[at], run)
            error = (whole[at][own] - values[at][own]).abs()
            assert (error <= 2.0**-4 * values[at][own].abs().max()).all()
    results, blocks = [], update.blocks(RUNS, device)
    for (m, v), (of_m, of_v) in ((stored, scales), (whole, (None, None))):
        main = torch.zeros(NUMEL, device=device)
        shard = FlatShard(main, m, v, None, None, RUNS, blocks, exp_avg_scales=of_m, exp_avg_sq_scales=of_v)
        update.update(shard, grads, table.coefficients)
        results.append(main)
    assert torch.equal(*results) and results[0].any()
    outside = torch.ones(NUMEL, dtype=torch.bool)
    for run in RUNS:
        outside[run.begin : run.end] = False
        for at in range(2):
            got = read_moment(stored[at], scales[at], run)
            assert torch.equal(got, _rounded(whole[at][run.begin : run.end], run, dtypes[at], is_square=at == 1)), (
                dtypes,
                run,
            )
    assert not any(one[outside].any() for one in stored)


def _rounded(values: torch.Tensor, run: Run, dtype: torch.dtype, *, is_square: bool) -> torch.Tensor:
    """Return the values rounded piece by piece, each with the scale that brings its largest one near the end of the range."""
    if dtype not in SCALED_FORMATS:
        return values.to(dtype).float()
    kind, largest = (torch.float16, 57344.0) if dtype == torch.float16 else (torch.float8_e4m3fn, 448.0)
    smallest = torch.finfo(kind).smallest_normal * torch.finfo(kind).eps
    found = []
    cuts = [run.begin, *range(run.begin // 1024 * 1024 + 1024, run.end, 1024), run.end]
    for begin, end in pairwise(cuts):
        piece = values[begin - run.begin : end - run.begin]
        scale = 2.0 ** math.ceil(math.log2(float(piece.abs().max()) / largest))
        rounded = (piece / scale).to(kind).float()
        if is_square:
            rounded = rounded.where((piece <= 0) | (rounded > 0), smallest)
        found.append(rounded * scale)
    return torch.cat(found)


def _skip_a_step(updates: tuple[adamw_update.AdamWUpdate, ...]) -> None:
    """A step that found an infinity changes no bit of weights, state and scales, and no count; the next one does."""
    for update in updates:
        table, tensors = _table(), [torch.randn(NUMEL), torch.randn(NUMEL), torch.full((NUMEL,), 9, dtype=torch.uint8)]
        model, scales = torch.zeros(NUMEL, dtype=torch.float16), torch.full((8,), 3.0)
        before = [tensor.clone() for tensor in (*tensors, scales, table.steps)]
        blocks = update.blocks(RUNS, torch.device("cpu"))
        main, exp_avg, exp_avg_sq = tensors
        shard = FlatShard(main, exp_avg, exp_avg_sq, None, model, RUNS, blocks, exp_avg_sq_scales=scales)
        grads = torch.full((NUMEL,), float("inf"))
        for found in (1.0, 0.0):
            update.write_coefficients(table, torch.tensor(float("nan") if found else 0.0), torch.tensor([found]))
            update.update(shard, grads if found else grads.zero_(), table.coefficients)
            unchanged = [torch.equal(*pair) for pair in zip((*tensors, scales, table.steps), before, strict=True)]
            assert unchanged == [bool(found)] * 5 and bool(model.any()) != bool(found), (type(update), found, unchanged)


def _compare_encodings(
    generator: torch.Generator,
    table: HyperparameterTable,
    main: torch.dtype,
    nominal: torch.dtype,
    *,
    keeps_remainder: bool,
    writes: bool,
) -> None:
    """What the kernel measures and writes is, to the last bit, what operations make of the main weights that it has left."""
    weights = torch.randn(NUMEL, generator=generator).to(main)
    weights[2300] = float("nan") if writes else 1.0
    shard = FlatShard(
        main=weights,
        exp_avg=torch.randn(NUMEL, generator=generator) * 0.1,
        exp_avg_sq=torch.rand(NUMEL, generator=generator) * 0.01,
        remainder=torch.zeros(NUMEL, dtype=torch.int16) if keeps_remainder else None,
        model=None,
        runs=RUNS,
        blocks=adamw_update.AdamWUpdate(uses_kernels=True).blocks(RUNS, torch.device("cpu")),
    )
    scale = torch.ones(3 * SCALE_ALIGNMENT)
    scale[::SCALE_ALIGNMENT] = torch.tensor([3.7, 150.0, 448.0])
    found = []
    for _ in range(2):
        target = torch.zeros(NUMEL, dtype=torch.uint8) if writes else None
        found.append(UpdateEncoding(target, scale, torch.zeros_like(scale), nominal))
    found[0].amax[SCALE_ALIGNMENT] = found[1].amax[SCALE_ALIGNMENT] = 100.0  # of another part of the weight
    adamw_update.AdamWUpdate(uses_kernels=True).update(
        shard, torch.randn(NUMEL, generator=generator), table.coefficients, found[0]
    )
    adamw_update._encode(shard, found[1])
    maxima = [one.amax.nan_to_num(nan=float("inf"), posinf=float("inf")) for one in found]
    assert torch.equal(*maxima), (main, nominal, [one[::SCALE_ALIGNMENT] for one in maxima])
    assert maxima[0].count_nonzero() == 3 and maxima[0][SCALE_ALIGNMENT] == 100.0
    for one in found:
        if one.target is not None:
            one.target[one.target & 0x7F == NAN_BYTE] = NAN_BYTE  # the sign of NaN is nobody's
            assert one.target[2300] == NAN_BYTE and not one.target[2100:2110].any()
    assert not writes or torch.equal(found[0].target, found[1].target), (main, nominal)  # type: ignore[arg-type]


def _assert_close(got: FlatShard, expected: FlatShard, keeps_remainder: bool) -> None:
    close: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-7, "equal_nan": True}
    torch.testing.assert_close(got.exp_avg, expected.exp_avg, **close)
    torch.testing.assert_close(got.exp_avg_sq, expected.exp_avg_sq, **close)
    whole = [
        adamw_update.join(shard.main, shard.remainder) if shard.remainder is not None else shard.main
        for shard in (got, expected)
    ]
    # The interpreter truncates to bf16 where devices round, so the neighbouring number is right too.
    rounded: dict[str, Any] = {"rtol": 2.0**-7, "atol": 0.0, "equal_nan": True}
    torch.testing.assert_close(*whole, **(close if whole[0].dtype == FP32 else rounded))
    assert got.main[100].isnan() and got.main[2105].isfinite() and got.main[0].isfinite()
    if got.model is not None and expected.model is not None:
        torch.testing.assert_close(got.model, expected.model, **rounded)
        if keeps_remainder:
            inside = slice(3, 2100)
            assert torch.equal(got.model[inside].view(torch.int16), got.main[inside].view(torch.int16))
