"""``--cuda-graph-impl full_iteration`` trains as without it; on the CPU a tape of memory operations is the graph."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.full_cuda_graph import FullCudaGraph
from megatron.training.arguments import parse_settings
from megatron.training.launch.pretrain import pretrain
from tests.support.launch import run_ranks
from tests.support.tape_graph import TapeGraph
from tests.support.tiny_run import SHARDED, TINY, Run
from tests.training.cli.test_flags import MINIMAL

_BASE = TINY.replace("--distributed-backend gloo", "") + (
    " --train-iters 8 --lr-decay-style cosine --lr-warmup-iters 3 --min-lr 1e-4 --eval-iters 1 --eval-interval 2 "
    "--weight-decay-incr-style linear --start-weight-decay 0.0 --end-weight-decay 0.1 --log-params-norm"
)
_GRAPH = "--cuda-graph-impl full_iteration"
_VARIANTS = {
    "one microbatch": f"{SHARDED} --global-batch-size 4",
    "three microbatches": f"{SHARDED} --global-batch-size 12",
    "per token": f"{SHARDED} --global-batch-size 12 --calculate-per-token-loss --log-num-zeros-in-grad",
    "sharded optimizer": "--use-megatron-fsdp --data-parallel-sharding-strategy optim --global-batch-size 12",
    "plain": "--global-batch-size 12",
    "bf16, unclipped": f"{SHARDED} --bf16 --clip-grad 0 --overlap-param-gather --overlap-grad-reduce",
    "two halves": f"{SHARDED} --bf16 --use-precision-aware-optimizer --global-batch-size 12",
    "kept weights": f"{SHARDED} --fsdp-memory-budget 100000 --global-batch-size 12 --overlap-param-gather",
    "recomputed": f"{SHARDED} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
    "--attention-dropout 0 --hidden-dropout 0",
    "scores recomputed": f"{SHARDED} --recompute-granularity selective --attention-dropout 0 --hidden-dropout 0",
}


def _persistent(computation: Any) -> list[torch.Tensor]:
    """Return the state between steps: main and model weights, and the optimizer's state."""
    state = [value for entries in computation.optimizer.optimizer.state.values() for value in entries.values()]
    weights = [group.weights.model.local for group in computation.model.parameter_groups]
    steps = [table.steps for table in computation.optimizer.optimizer._tables]
    tensors = (*weights, *(parameter.detach() for parameter in computation.model.parameters()), *state, *steps)
    return [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]


def _train_all(flags: dict[str, str]) -> dict[str, tuple[Run, int]]:
    """Return, by name, the output of each run and the number of its replays."""
    return {name: _train(f"{_BASE} {added}".split()) for name, added in flags.items()}


def _train(argv: Sequence[str]) -> tuple[Run, int]:
    import megatron.training.launch.pretrain as module
    from megatron.core.datasets.mock_corpus import MockGPTLowLevelDataset
    from pretrain_gpt import datasets_provider, forward_step, model_provider

    MockGPTLowLevelDataset.size = 100
    settings = parse_settings(argv)
    settings = replace(settings, distributed=replace(settings.distributed, backend="gloo"))
    printed, tapes, error = io.StringIO(), [], None

    def make(computation: Any, contexts: Any, graph: None, *, warmup_steps: int, tracker: None) -> FullCudaGraph:
        tapes.append(TapeGraph(lambda: _persistent(computation)))
        return FullCudaGraph(computation, contexts, tapes[0], warmup_steps=warmup_steps)

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(module, "FullCudaGraph", make)
        patch.setattr(module, "CudaStepGraph", lambda *_, **__: None)
        begin = module._begin_capturing
        patch.setattr(module, "_begin_capturing", lambda device: begin(torch.device("cuda", 0)))
        try:
            pretrain(
                settings,
                model_provider=model_provider,
                datasets_provider=datasets_provider,
                forward_step=forward_step,
            )
        except (RuntimeError, ValueError) as raised:
            error = f"{type(raised).__name__}: {raised}"
    return Run(printed.getvalue(), error), sum(tape.num_replays for tape in tapes)


def _logged(run: Run) -> list[str]:
    """Return the log of steps and evaluations without dates, times and memory."""
    assert run.error is None, run.error
    lines = [line.split("]", 1)[-1] for line in run.output.splitlines() if "lm loss" in line]
    return [
        " | ".join(part for part in line.split(" | ") if "(ms)" not in part and "(MiB)" not in part) for line in lines
    ]


_CASES = [(1, "one microbatch"), (1, "three microbatches"), *((2, name) for name in _VARIANTS)]


@cache
def _pairs(num_ranks: int) -> dict[str, tuple[Run, int]]:
    flags = {name: _VARIANTS[name] for ranks, name in _CASES if ranks == num_ranks}
    eager = {f"{name}, eager": added for name, added in flags.items()}
    graph = {f"{name}, graph": f"{added} {_GRAPH}" for name, added in flags.items()}
    runs: dict[str, tuple[Run, int]] = run_ranks(num_ranks, _train_all, eager | graph)[0]
    return runs


@pytest.mark.parametrize(("num_ranks", "name"), _CASES)
def test_a_captured_run_logs_what_an_eager_one_logs(num_ranks: int, name: str) -> None:
    """Losses, gradient and weight norms, learning rates and evaluations in between, to the last digit that is printed.

    Rates grow and fall, weight decay grows, dropout is on (where nothing is recomputed).
    """
    (eager, none), (graph, replays) = (_pairs(num_ranks)[f"{name}, {way}"] for way in ("eager", "graph"))
    assert (none, replays) == (0, 5)
    assert len(_logged(eager)) >= 12 and len(set(eager.losses.values())) == 8
    assert _logged(graph) == _logged(eager)


def test_the_switched_off_gather_is_told() -> None:
    (eager, _), (graph, _) = (_pairs(1)[f"one microbatch, {way}"] for way in ("eager", "graph"))
    told = "fsdp_all_gather_in_start_param_sync is off"
    assert told in graph.output and told not in eager.output
    assert "fsdp_all_gather_in_start_param_sync=False" in graph.output
    assert re.search(r"CUDA graph \.+ each whole iteration, after 3 eager ones", graph.output)
    assert re.search(r"CUDA graph \.+ none", eager.output)


def test_checkpoints_between_replays_go_on_eagerly_and_captured(tmp_path: Path) -> None:
    whole = f"{SHARDED} --global-batch-size 12"
    save = f"{whole} {_GRAPH} --save {tmp_path} --save-interval 5 --exit-interval 5"
    load = f"{whole} --load {tmp_path} --ckpt-step 5"
    runs = run_ranks(
        2,
        _train_all,
        {
            "whole": whole,
            "saved": save,
            "eager": load,
            "captured": f"{load} {_GRAPH} --cuda-graph-warmup-steps 2",
        },
    )[0]
    whole_losses = runs["whole"][0].losses
    assert runs["saved"][1] == 2 and runs["captured"][1] == 1
    assert runs["saved"][0].losses == {i: whole_losses[i] for i in range(1, 6)}
    for name in ("eager", "captured"):
        assert runs[name][0].losses == {i: whole_losses[i] for i in range(6, 9)}, runs[name][0].error


def test_cpus_are_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    settings = parse_settings([*MINIMAL, "--cuda-graph-impl", "full_iteration"], world_size=1)
    try:
        with pytest.raises(ValueError, match="full_iteration needs CUDA devices, got cpu"):
            pretrain(settings, model_provider=None, datasets_provider=None, forward_step=None)  # type: ignore[arg-type]
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "spelling", ["--cuda-graph-impl full_iteration", "--cuda-graph-impl local --cuda-graph-scope full_iteration"]
)
def test_both_spellings_switch_the_early_gather_off(spelling: str) -> None:
    settings = parse_settings([*MINIMAL, *spelling.split(), "--cuda-graph-warmup-steps", "4"], world_size=1)
    assert settings.cuda_graph.enabled and settings.cuda_graph.warmup_steps == 4
    assert not settings.ddp.fsdp_all_gather_in_start_param_sync
    eager = parse_settings(MINIMAL, world_size=1)
    assert not eager.cuda_graph.enabled and eager.cuda_graph.warmup_steps == 3
    assert eager.ddp.fsdp_all_gather_in_start_param_sync
