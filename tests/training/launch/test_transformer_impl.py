"""Which layers a launch line gets, and FP8 from the command line, with transformer-engine's stand-in on CPUs."""

from __future__ import annotations

import pytest
import torch

import pretrain_gpt
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.training.arguments import parse_settings
from megatron.training.launch.gpt_config import build_gpt_model
from tests.support import fake_transformer_engine
from tests.support.launch import run_ranks
from tests.support.tiny_run import SHARDED, TINY, Run, train_one

BF16 = f"{TINY} {SHARDED} --bf16 --attention-dropout 0 --hidden-dropout 0"
FP8 = "--fp8-format hybrid --fp8-recipe"
NOTE = "transformer-engine is not used ({}): layers are the local ones"
REASONS = {
    "missing": NOTE.format("it runs on CUDA devices, and these are cpu"),
    "fastest": NOTE.format(
        "in bf16 the framework's own layers are faster, and give the same; --layer-kernels transformer_engine takes its own"
    ),
}
OWN = "--layer-kernels transformer_engine"
RUNS = {
    "missing": (False, OWN),
    "local": (True, "--transformer-impl local"),
    "fastest": (True, ""),
    "asked for": (True, OWN),
    "delayed": (True, f"{FP8} delayed --fp8-amax-history-len 4 --fp8-amax-compute-algo max"),
    "tensorwise": (True, f"{FP8} tensorwise --first-last-layers-bf16 --num-layers-at-end-in-bf16 0"),
    "blockwise": (
        True,
        f"{FP8} blockwise --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "pipeline": (True, f"{FP8} delayed --pipeline-model-parallel-size 2"),
    "tensor": (True, f"{FP8} tensorwise --tensor-model-parallel-size 2 --sequence-parallel"),
}


def _train() -> dict[str, tuple[Run, list[str]]]:
    """The runs, and the recipes of what was multiplied in FP8."""
    found = {}
    for name, (is_there, flags) in RUNS.items():
        if is_there:
            fake_transformer_engine.install()
        run = train_one(f"{BF16} {flags}".split())
        found[name] = run, list(fake_transformer_engine.FP8GlobalStateManager.entered)
    return found


def test_launch_lines_get_the_layers_that_they_ask_for() -> None:
    runs = run_ranks(2, _train)[0]
    for name, (run, _) in runs.items():
        assert run.error is None and len(run.losses) == 4, (name, run.error)
        assert [run.output.count(note) for note in REASONS.values()] == [name == other for other in REASONS], name
    losses = {name: torch.tensor(list(run.losses.values())) for name, (run, _) in runs.items()}
    assert torch.equal(losses["missing"], losses["local"])
    assert torch.equal(losses["fastest"], losses["local"])
    # A norm's output is rounded to bf16 or not; FP8 has 3 bits of mantissa.
    torch.testing.assert_close(losses["asked for"], losses["local"], rtol=2e-3, atol=0)
    for name in ("delayed", "tensorwise", "blockwise", "pipeline", "tensor"):
        assert not torch.equal(losses[name], losses["asked for"]), name
        torch.testing.assert_close(losses[name], losses["local"], rtol=2e-2, atol=0)
    entered = {name: recipes for name, (_, recipes) in runs.items()}
    # 4 steps of 2 microbatches: a context around each forward, around each layer but the first, around each layer twice.
    assert entered["asked for"] == []
    assert entered["delayed"] == ["DelayedScaling"] * 8
    assert entered["tensorwise"] == ["Float8CurrentScaling"] * 8
    assert entered["blockwise"] == ["Float8BlockScaling"] * 32


def _train_split() -> list[float]:
    """The losses; the largest values are reduced over the ranks of each stage."""
    fake_transformer_engine.install()
    split = "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"
    run = train_one(f"{BF16} {RUNS['delayed'][1]} {split}".split())
    assert run.error is None, run.error
    return list(run.losses.values())


def test_stages_that_are_split_over_tensor_parallel_ranks_scale_with_delay() -> None:
    found = run_ranks(4, _train_split)
    assert len(found[0]) == 4 and found[0][-1] < found[0][0]


def test_fp8_without_transformer_engine_is_refused_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain_gpt.main(f"{BF16} --fp8-format hybrid".split()) == 2
    message = capsys.readouterr().err
    assert "--fp8-format hybrid needs transformer-engine" in message and "these are cpu; install it" in message


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--fp8-format hybrid --fp8-recipe mxfp8", "mxfp8 needs Blackwell"),
        ("--fp8-format hybrid --no-fp8-wgrad", "--no-fp8-wgrad is refused: transformer-engine no longer"),
        ("--fp4-format e2m1", "FP4 needs Blackwell"),
    ],
)
def test_what_of_fp8_is_not_served_is_refused(flags: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain_gpt.main(f"{BF16} {flags}".split()) == 2
    assert reason in capsys.readouterr().err


def test_experts_are_transformer_engines_too() -> None:
    experts = "--num-experts 4 --moe-grouped-gemm --disable-bias-linear --swiglu"
    with fake_transformer_engine.installed():
        settings = parse_settings(f"{BF16} {OWN} {experts}".split())
        model = build_gpt_model(settings.model, vocab_size=99, device=torch.device("cpu"))
        assert sum(isinstance(module, TEGroupedMLP) for module in model.modules()) == 2
