"""``--overlap-moe-expert-parallel-comm`` trains as without it, to the last digit that is logged."""

from __future__ import annotations

from functools import cache

import pytest

from tests.support.tiny_run import SHARDED, Run, train_all

_OVERLAP = "--overlap-moe-expert-parallel-comm"
_DELAY = f"{_OVERLAP} --delay-wgrad-compute"
_EXPERTS = (
    "--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.01 "
    "--disable-bias-linear --swiglu --moe-ffn-hidden-size 24 --num-layers 4 --train-iters 3"
)
_OPTIM, _GRADS = (SHARDED.replace("optim_grads_params", name) for name in ("optim", "optim_grads"))
_STAGES = f"{SHARDED} --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
_CASES: dict[str, tuple[int, str, str]] = {
    "not sharded": (2, "--global-batch-size 12", _DELAY),
    "one microbatch": (2, f"{SHARDED} --global-batch-size 4", _OVERLAP),
    "two microbatches": (2, f"{SHARDED} --global-batch-size 8", _OVERLAP),
    "five microbatches": (2, f"{SHARDED} --global-batch-size 20 --num-layers 3", _DELAY),
    "sharded gradients": (2, f"{_GRADS} --global-batch-size 12", _DELAY),
    "sharded optimizer": (2, f"{_OPTIM} --global-batch-size 12", _OVERLAP),
    "shared experts, recomputed attention, bf16": (
        2,
        f"{SHARDED} --global-batch-size 12 --moe-shared-expert-intermediate-size 16 --recompute-granularity selective --bf16 "
        "--moe-grouped-gemm --calculate-per-token-loss",
        _DELAY,
    ),
    "multi-token prediction": (2, f"{SHARDED} --global-batch-size 8 --mtp-num-layers 1", _OVERLAP),
    "kept weights": (2, f"{SHARDED} --global-batch-size 12 --fsdp-memory-budget 100000", _OVERLAP),
    "virtual stages": (4, f"{_STAGES} --global-batch-size 8", _DELAY),
    "virtual stages of a sharded optimizer": (
        4,
        f"{_STAGES.replace(SHARDED, _OPTIM)} --global-batch-size 16",
        _OVERLAP,
    ),
}
"""Ranks, flags of both runs, flags of the second."""


@cache
def _runs(num_ranks: int) -> dict[str, Run]:
    cases = {name: (flags, added) for name, (ranks, flags, added) in _CASES.items() if ranks == num_ranks}
    flags = {name: f"{_EXPERTS} {own}" for name, (own, _) in cases.items()}
    return train_all(
        num_ranks, flags | {f"{name}, turns": f"{flags[name]} {added}" for name, (_, added) in cases.items()}
    )


@pytest.mark.parametrize("name", _CASES)
def test_a_run_whose_passes_take_turns_logs_what_it_logs_without(name: str) -> None:
    runs = _runs(_CASES[name][0])
    plain, turns = runs[name], runs[f"{name}, turns"]
    assert plain.error is turns.error is None, (plain.error, turns.error)
    assert len(plain.losses) == 3 and len(set(plain.losses.values())) == 3
    assert (turns.losses, turns.grad_norms, turns.auxiliary) == (plain.losses, plain.grad_norms, plain.auxiliary)
    assert "out of the planned order" not in turns.output
