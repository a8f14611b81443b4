"""The Triton kernels compute what the torch operations compute.

tests/core/test_interpreted_kernels.py runs the check.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from megatron.core.distributed.fsdp.codec.float8 import NAN_BYTE, SCALE_ALIGNMENT, UpdateEncoding
from megatron.core.distributed.fsdp.flat_optimizer import adamw_update
from megatron.core.distributed.fsdp.flat_optimizer.adamw_update import FlatShard, Run
from megatron.core.distributed.fsdp.flat_optimizer.hyperparameter_table import HyperparameterTable

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
RUNS = (Run(3, 500, 0, 0), Run(500, 700, 1, 2), Run(700, 2100, 0, 1), Run(2110, NUMEL - 7, 1, 2))
# (main weights, nominal dtype, remainders, bytes): bytes beside main weights, or their maxima alone
ENCODED = [(FP32, BF16, False, True), (BF16, BF16, True, True), (FP32, FP32, False, True), (FP32, BF16, False, False)]


def _table() -> HyperparameterTable:
    parameters = [torch.empty(0) for _ in range(3)]
    rates = [(0.01, 0.1, 0.9, 0.999, 1e-8), (0.02, 0.0, 0.0, 0.95, 1e-6)]
    param_groups = [
        {"params": members, "lr": lr, "weight_decay": decay, "betas": betas, "eps": eps}
        for members, (lr, decay, *betas, eps) in zip((parameters[::2], parameters[1:2]), rates, strict=True)
    ]
    groups: list[Any] = [SimpleNamespace(sharded=[parameter]) for parameter in parameters]
    table = HyperparameterTable(param_groups, groups, torch.device("cpu"))
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
    _skip_a_step((kernels, operations))


def _skip_a_step(updates: tuple[adamw_update.AdamWUpdate, ...]) -> None:
    """A step that found an infinity changes no bit of weights and state, and no count; the next one does."""
    for update in updates:
        table, tensors = _table(), [torch.randn(NUMEL) for _ in range(3)]
        model = torch.zeros(NUMEL, dtype=torch.float16)
        before = [tensor.clone() for tensor in (*tensors, table.steps)]
        blocks = update.blocks(RUNS, torch.device("cpu"))
        main, exp_avg, exp_avg_sq = tensors
        shard = FlatShard(main, exp_avg, exp_avg_sq, remainder=None, model=model, runs=RUNS, blocks=blocks)
        grads = torch.full((NUMEL,), float("inf"))
        for found in (1.0, 0.0):
            update.write_coefficients(table, torch.tensor(float("nan") if found else 0.0), torch.tensor([found]))
            update.update(shard, grads if found else grads.zero_(), table.coefficients)
            unchanged = [torch.equal(*pair) for pair in zip((*tensors, table.steps), before, strict=True)]
            assert unchanged == [bool(found)] * 4 and bool(model.any()) != bool(found), (type(update), found, unchanged)


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
