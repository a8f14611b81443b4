"""Passes that take turns on CUDA, where exchanges are on a stream of their own, log what they log without turns."""

from __future__ import annotations

import warnings
from functools import cache

import pytest

from tests.support.launch import run_ranks
from tests.support.tiny_run import TINY, Run, train_one

_BASE = TINY.replace("--distributed-backend gloo", "--distributed-backend nccl") + (
    " --use-megatron-fsdp --hidden-size 64 --num-layers 4 --bf16 --disable-bias-linear --swiglu --global-batch-size 12 "
    # Kernels that add in any order would tell two runs apart without turns, too.
    "--transformer-impl local --deterministic-mode --attention-backend unfused --attention-dropout 0 --hidden-dropout 0 "
    "--num-experts 4 --expert-model-parallel-size 2 --moe-ffn-hidden-size 32 --moe-aux-loss-coeff 0.01 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall"
)
_CASES = {
    "optim_grads_params": "",
    "optim_grads": "--moe-shared-expert-intermediate-size 32",
    "optim": "--moe-expert-rank-capacity-factor 2",
}
"""Strategies, with further flags."""


def _train_all(flags: dict[str, str]) -> dict[str, Run]:
    warnings.simplefilter("default")  # those of libraries about devices are not what is tested here
    return {name: train_one(f"{_BASE} {added}".split()) for name, added in flags.items()}


@cache
def _runs() -> dict[str, Run]:
    turns = "--overlap-moe-expert-parallel-comm --delay-wgrad-compute"
    flags = {name: f"--data-parallel-sharding-strategy {name} {added}" for name, added in _CASES.items()}
    flags |= {f"{name}, turns": f"{added} {turns}" for name, added in flags.items()}
    runs: dict[str, Run] = run_ranks(2, _train_all, flags, backend="nccl", timeout_s=280.0)[0]
    return runs


@pytest.mark.gpu(2)
@pytest.mark.parametrize("strategy", _CASES)
def test_a_run_on_devices_whose_passes_take_turns_logs_what_it_logs_without(strategy: str) -> None:
    plain, turns = _runs()[strategy], _runs()[f"{strategy}, turns"]
    assert plain.error is turns.error is None, (plain.error, turns.error)
    assert len(set(plain.losses.values())) == 4
    assert (turns.losses, turns.grad_norms, turns.auxiliary) == (plain.losses, plain.grad_norms, plain.auxiliary)
