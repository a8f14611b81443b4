"""Training in fp16 from the command line: overflows skip steps, and a resumed run goes on bit by bit; tests/parity has more splits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.tiny_run import SHARDED, TINY, Run, train_all

_BASE = (
    f"{TINY.replace('--train-iters 4', '--train-iters 8')} --attention-dropout 0 --hidden-dropout 0 --lr-warmup-iters 3"
)
_FP16 = "--fp16 --initial-loss-scale 1048576 --loss-scale-window 2 --hysteresis 1"  # from 2^19 on this model overflows
_CONSTANT = "--fp16 --loss-scale 1024 --train-iters 4"
_EXPERTS = (
    "--num-experts 4 --moe-ffn-hidden-size 16 --swiglu --disable-bias-linear --moe-aux-loss-coeff 0.5 "
    "--moe-z-loss-coeff 0.05"
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fp16")


@pytest.fixture(scope="module")
def runs(root: Path) -> dict[str, Run]:
    sharded = f"{SHARDED} {_FP16}"
    experts = f"{SHARDED} {_EXPERTS} --expert-model-parallel-size 2 --train-iters 4"
    flags = {
        "fp32": f"{SHARDED} --train-iters 4",
        "constant": f"{SHARDED} {_CONSTANT}",
        "whole": f"{sharded} --tensorboard-dir {root}/board",
        "halfway": f"{sharded} --exit-interval 5 --save {root}/halfway",
        "resumed": f"{sharded} --load {root}/halfway",
        "tp": f"{_CONSTANT} --tensor-model-parallel-size 2 --sequence-parallel",
        "pp": f"{_CONSTANT} --pipeline-model-parallel-size 2 --apply-query-key-layer-scaling",
        "experts": experts,
        "experts, scaled": f"{experts} --loss-scale 1024",
    }
    return train_all(2, flags, base=_BASE)


def _field(run: Run, name: str) -> list[float]:
    lines = [line for line in run.output.splitlines() if " lm loss: " in line]
    return [float(re.search(rf"\| {name}: +(\S+) ", line)[1]) for line in lines]  # type: ignore[index]


def test_skipped_steps_shrink_the_scale_and_hold_the_schedule(runs: dict[str, Run]) -> None:
    run = runs["whole"]
    assert run.error is None, run.error
    skipped, scales, rates = (_field(run, n) for n in ("number of skipped iterations", "loss scale", "learning rate"))
    assert skipped[0] == 1 and skipped.count(1) >= 3 and skipped.count(0) >= 3
    scale, clean, steps = 1048576.0, 0, 0
    for skips, logged, rate in zip(skipped, scales, rates, strict=True):
        clean, steps = (0, steps) if skips else (clean + 1, steps + 1)
        if skips:
            scale /= 2
        elif clean == 2:
            clean, scale = 0, scale * 2
        assert logged == scale
        if steps <= 3:
            assert rate == pytest.approx(1e-2 * steps / 3, rel=1e-5), "only steps that were not skipped count"
    for line, skips in zip([x for x in run.output.splitlines() if " lm loss: " in x], skipped, strict=True):
        assert ("grad norm" in line) == (not skips), "as in Megatron-LM"
    assert "--fp16 is taken with --no-check-for-nan-in-loss-and-grad" in run.output
    assert re.search(r"gradients on the wire \.+ float16", run.output)


def test_a_resumed_run_enter_root_the_scale_to_the_last_bit(runs: dict[str, Run]) -> None:
    whole, resumed = runs["whole"], runs["resumed"]
    assert resumed.error is None and runs["halfway"].error is None
    assert _field(resumed, "loss scale") == _field(whole, "loss scale")[5:]
    assert _field(resumed, "exact loss") == _field(whole, "exact loss")[5:]
    assert _field(resumed, "learning rate") == _field(whole, "learning rate")[5:]
    assert resumed.grad_norms == {step: norm for step, norm in whole.grad_norms.items() if step > 5}
    assert resumed.grad_norms, "not all of these steps are skipped"


@pytest.mark.parametrize("name", ["constant", "tp", "pp"])
def test_every_split_trains_as_fp32_does(runs: dict[str, Run], name: str) -> None:
    """Up to fp16's rounding, 2^-11 of what is rounded, over four steps."""
    fp32, run = runs["fp32"], runs[name]
    assert run.error is None, run.error
    assert run.losses == pytest.approx(fp32.losses, rel=1e-3) and len(run.losses) == 4
    assert run.grad_norms == pytest.approx(fp32.grad_norms, rel=1e-2)
    assert run.losses != fp32.losses


def test_auxiliary_losses_are_scaled_as_the_loss_is(runs: dict[str, Run]) -> None:
    plain, scaled = runs["experts"], runs["experts, scaled"]
    assert plain.error is None and scaled.error is None
    assert _field(scaled, "loss scale") == [1024.0] * 4
    assert scaled.losses == plain.losses and scaled.grad_norms == plain.grad_norms, "a power of two rounds nothing"
    assert scaled.auxiliary == plain.auxiliary


def test_scales_are_points_of_tensorboard(runs: dict[str, Run], root: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(root / "board"))
    board.Reload()
    assert [point.value for point in board.Scalars("loss-scale")] == _field(runs["whole"], "loss scale")
    assert len(board.Scalars("grad-norm")) == len(runs["whole"].grad_norms)
