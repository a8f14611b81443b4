"""A captured run on GPUs: bitwise the losses of an eager one, with every transport, dropout, schedules, evaluations, saves."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import warnings
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

from megatron.core.full_cuda_graph import CudaStepGraph, FullCudaGraph, Microbatch
from tests.support.launch import run_ranks, served_transports
from tests.support.tiny_run import TINY, Run

_BASE = TINY.replace("--distributed-backend gloo", "--distributed-backend nccl") + (
    " --train-iters 8 --lr-decay-style cosine --lr-warmup-iters 4 --min-lr 1e-4 --eval-iters 1 --eval-interval 2 "
    "--weight-decay-incr-style linear --start-weight-decay 0.0 --end-weight-decay 0.1 --log-params-norm "
    "--log-num-zeros-in-grad --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
    # Kernels that add in any order, such as that of the embedding's gradient, would tell two eager runs apart too.
    "--overlap-param-gather --overlap-grad-reduce --hidden-size 64 --num-layers 3 --deterministic-mode"
)
_GRAPH = "--cuda-graph-impl full_iteration"
# Scores in memory: attention's other kernels may add in any order, and no two runs would be equal.
_VARIANTS = {
    "one microbatch": "--attention-backend unfused --global-batch-size 4",
    "three microbatches": "--attention-backend unfused --global-batch-size 12",
    "per token": "--attention-backend unfused --global-batch-size 12 --calculate-per-token-loss",
    "bf16": "--attention-backend unfused --global-batch-size 12 --bf16 --create-all-gather-group --clip-grad 0.5",
    "sharded optimizer": (
        "--attention-backend unfused --global-batch-size 12 --bf16 --data-parallel-sharding-strategy optim"
    ),
    "fp16": (
        "--attention-backend unfused --global-batch-size 12 --fp16 --initial-loss-scale 4194304 --loss-scale-window 2 "
        "--hysteresis 1"
    ),
    "two halves": "--attention-backend unfused --global-batch-size 12 --bf16 --use-precision-aware-optimizer",
    "kept weights": "--attention-backend unfused --global-batch-size 12 --fsdp-memory-budget 300000",
    "recomputed": (
        "--attention-backend unfused --attention-dropout 0 --hidden-dropout 0 --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1 --global-batch-size 12"
    ),
}
# Two ranks that do not share all their data, or not all of the model.
_SPLIT = {
    "tensor parallel": "--attention-backend unfused --global-batch-size 12 --tensor-model-parallel-size 2",
    "sequence parallel": (
        "--attention-backend unfused --global-batch-size 12 --bf16 --tensor-model-parallel-size 2 --sequence-parallel"
    ),
    "two instances": "--attention-backend unfused --global-batch-size 12 --num-distributed-optimizer-instances 2",
    "two instances, sharded optimizer": (
        "--attention-backend unfused --global-batch-size 12 --bf16 --num-distributed-optimizer-instances 2 "
        "--outer-dp-sharding-strategy optim"
    ),
}

_EXPERTS = (
    "--attention-backend unfused --attention-dropout 0 --hidden-dropout 0 --global-batch-size 12 --bf16 --disable-bias-linear --swiglu "
    "--num-experts 4 --moe-ffn-hidden-size 32 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001 "
    "--moe-grouped-gemm --moe-token-dispatcher-type alltoall"
)
_BOUNDED = f"{_EXPERTS} --moe-expert-rank-capacity-factor 2"
_WITH_EXPERTS = {
    "experts on each rank": _BOUNDED,
    "divided experts": f"{_BOUNDED} --expert-model-parallel-size 2",
    "divided experts with a bias": (
        f"{_BOUNDED} --expert-model-parallel-size 2 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
        "--moe-router-bias-update-rate 0.01 --moe-router-num-groups 2 --moe-router-group-topk 1"
    ),
    "divided experts of constant size": (
        f"{_EXPERTS} --expert-model-parallel-size 2 --moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity"
    ),
}

_FP8 = (
    "--attention-backend unfused --attention-dropout 0 --hidden-dropout 0 --global-batch-size 12 --bf16 --hidden-size 256 "
    "--seq-length 128 --max-position-embeddings 128 --fp8-format hybrid --num-layers 2"
)
_DELAYED = "--fp8-recipe delayed --fp8-amax-history-len 4 --fp8-amax-compute-algo max"
_IN_FP8 = {
    "delayed": f"{_FP8} {_DELAYED}",
    "delayed, weights in bytes": f"{_FP8} {_DELAYED} --fp8-param-gather",
    "delayed, recomputed": (
        f"{_FP8} {_DELAYED} --fp8-param-gather --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1"
    ),
    "tensorwise, weights in bytes": f"{_FP8} --fp8-recipe tensorwise --fp8-param-gather --keep-fp8-transpose-cache",
    "blockwise, weights in bytes": f"{_FP8} --fp8-recipe blockwise --fp8-param-gather",
}


class _Trace(NamedTuple):
    """The outcome of a run."""

    run: Run
    steps: list[tuple[float, float, float]]
    """(sum of losses, tokens, gradient norm) of each step, unrounded."""
    num_replays: int


def _train_all(flags: dict[str, str]) -> dict[str, _Trace]:
    warnings.simplefilter("default")  # those of libraries about devices are not what is tested here
    torch.backends.cuda.matmul.allow_tf32 = False
    return {name: _train(f"{_BASE} {added}".split()) for name, added in flags.items()}


def _train(argv: list[str]) -> _Trace:
    from megatron.core.datasets.mock_corpus import MockGPTLowLevelDataset
    from megatron.training.arguments import parse_settings
    from megatron.training.launch.pretrain import pretrain
    from megatron.training.loop.train_step import TrainStep
    from pretrain_gpt import datasets_provider, forward_step, model_provider

    MockGPTLowLevelDataset.size = 100
    records: list[Any] = []
    replays: list[None] = []
    step, replay = TrainStep.__call__, CudaStepGraph.replay

    def recorded(*args: Any) -> Any:
        records.append(step(*args))
        return records[-1]

    def counted(*args: Any) -> None:
        replays.append(None)
        replay(*args)

    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(TrainStep, "__call__", recorded)
        patch.setattr(CudaStepGraph, "replay", counted)
        pretrain(
            parse_settings(argv),
            model_provider=model_provider,
            datasets_provider=datasets_provider,
            forward_step=forward_step,
        )
    steps = [(*record.loss_and_tokens.tolist(), record.grad_norm.nan_to_num(-1.0).item()) for record in records]
    return _Trace(Run(printed.getvalue()), steps, len(replays))


def _logged(run: Run) -> list[str]:
    """Return the log of steps and evaluations without dates, times and memory."""
    lines = [line.split("]", 1)[-1] for line in run.output.splitlines() if "lm loss" in line]
    return [
        " | ".join(part for part in line.split(" | ") if "(ms)" not in part and "(MiB)" not in part) for line in lines
    ]


@cache
def _pairs(num_ranks: int, transport: str, kind: str) -> dict[str, _Trace]:
    variants = {"split": _SPLIT, "FP8": _IN_FP8, "dense": _VARIANTS, "experts": _WITH_EXPERTS}[kind]
    flags = {
        f"{name}, {way}": f"{added} --fsdp-transport {transport} {graph}"
        for name, added in variants.items()
        for way, graph in (("eager", ""), ("graph", _GRAPH))
    }
    traces: dict[str, _Trace] = run_ranks(num_ranks, _train_all, flags, backend="nccl", timeout_s=280.0)[0]
    return traces


def _assert_same(num_ranks: int, transport: str, name: str) -> None:
    kind = {
        **dict.fromkeys(_SPLIT, "split"),
        **dict.fromkeys(_IN_FP8, "FP8"),
        **dict.fromkeys(_WITH_EXPERTS, "experts"),
    }.get(name, "dense")
    traces = _pairs(num_ranks, transport, kind)
    eager, graph = traces[f"{name}, eager"], traces[f"{name}, graph"]
    assert (eager.num_replays, graph.num_replays) == (0, 5)
    assert len({loss for loss, *_ in eager.steps}) == 8
    assert graph.steps == eager.steps
    assert len(_logged(eager.run)) >= 12 and _logged(graph.run) == _logged(eager.run)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("name", _VARIANTS)
def test_a_captured_run_equals_an_eager_one_on_one_gpu(name: str) -> None:
    """Losses, norms and evaluations of 8 steps, 5 of them replays, to the last bit."""
    _assert_same(1, "nccl", name)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("transport", served_transports("nccl", "symm", "peer_copy"))
@pytest.mark.parametrize("name", _VARIANTS)
def test_a_captured_run_equals_an_eager_one_with_every_transport(transport: str, name: str) -> None:
    """As on one GPU; each transport in processes of its own, since symmetric memory has one backend in each."""
    _assert_same(2, transport, name)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", _SPLIT)
def test_a_captured_run_of_ranks_that_are_no_replicas_equals_an_eager_one(name: str) -> None:
    _assert_same(2, "nccl", name)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", _WITH_EXPERTS)
def test_a_captured_run_with_experts_equals_an_eager_one(name: str) -> None:
    """Where the host need not know how many rows an expert gets; the expert bias moves in replays, too."""
    _assert_same(2, "nccl", name)


@pytest.mark.gpu(2)
@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="transformer-engine is not there")
@pytest.mark.parametrize("name", _IN_FP8)
def test_a_captured_run_in_fp8_equals_an_eager_one(name: str) -> None:
    """Scales and histories move on the device, in a replay as in a step whose optimizer writes bytes itself."""
    _assert_same(2, "nccl", name)


@pytest.mark.gpu(2)
def test_a_checkpoint_between_replays_goes_on_eagerly(tmp_path: Path) -> None:
    whole = "--attention-backend unfused --global-batch-size 12 --fsdp-transport nccl"
    flags = {
        "whole": whole,
        "saved": f"{whole} {_GRAPH} --save {tmp_path} --save-interval 5",
        "resumed": f"{whole} --load {tmp_path} --ckpt-step 5",
        "resumed and captured": f"{whole} --load {tmp_path} --ckpt-step 5 {_GRAPH} --cuda-graph-warmup-steps 2",
    }
    traces = run_ranks(2, _train_all, flags, backend="nccl", timeout_s=280.0)[0]
    expected = traces["whole"].steps
    assert traces["saved"].steps == expected and traces["saved"].num_replays == 5
    assert traces["resumed"].steps == expected[5:]
    assert traces["resumed and captured"].steps == expected[5:] and traces["resumed and captured"].num_replays == 1


def _draw_eagerly_and_captured() -> tuple[list[list[float]], list[list[float]], int, int]:
    warnings.simplefilter("default")
    device = torch.device("cuda", torch.cuda.current_device())

    def step(microbatches: Any, draw: Any) -> dict[str, torch.Tensor]:
        drawn = []
        for index, data in enumerate(microbatches):
            draw(index)
            drawn += [F.dropout(data["x"], 0.5), torch.randn(64, device=device), F.dropout(data["x"], 0.1)]
        return {"drawn": torch.cat(drawn)}

    graph = FullCudaGraph(step, [], CudaStepGraph(device, num_microbatches=3), warmup_steps=2)
    eager, captured = [], []
    for iteration in range(5):
        inputs: list[Microbatch] = [{"x": torch.full((64,), 1.0 + iteration, device=device)} for _ in range(3)]
        # Microbatches 0 and 2 share a seed, and so do steps 3 and 4.
        seeds = [2**62 + min(iteration, 3), 7 * iteration, 2**62 + min(iteration, 3)]
        captured.append(graph(inputs, seeds)["drawn"])
        eager.append(step(inputs, lambda index, seeds=seeds: torch.manual_seed(seeds[index]))["drawn"])
    torch.manual_seed(5)
    first = torch.randint(2**40, (), device=device).item()
    graph.close()
    torch.manual_seed(5)
    second = torch.randint(2**40, (), device=device).item()
    return [t.tolist() for t in eager], [t.tolist() for t in captured], int(first), int(second)


@pytest.mark.gpu(1)
def test_replays_draw_what_eager_steps_draw() -> None:
    """Each microbatch from its own seed, which changes between replays; the default generator is restored."""
    eager, captured, first, second = run_ranks(1, _draw_eagerly_and_captured, backend="nccl")[0]
    assert captured == eager
    assert len({tuple(drawn) for drawn in eager}) == 5
    assert first == second
