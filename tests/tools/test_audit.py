"""The audit of a launch line: what is right agrees, each of six planted faults is named, and the exit status says it."""

from __future__ import annotations

import dataclasses
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.parity.cells import CELLS
from tests.support import planted_faults
from tests.support.launch import run_ranks
from tests.support.tiny_run import SHARDED, TINY
from tests.support.warm_python import warm_python

TOOL = Path(__file__).parents[2] / "tools" / "audit.py"
_SPLIT_CELLS = (
    "gpt-none-hfsdp-m4-token",
    "gpt-tp2+sp-optim_grads-m4-mean",
    "gpt-cp2-hsdp-m1-token",
    "gpt-pp2-optim_grads_params-m4-mean",
    "moe-ep2-optim-m4-mean",
)
"""Each way to split, on four ranks, with both models, both kinds of loss and all kinds of strategies."""

_TWO_RANKS = {
    "zero 3": SHARDED,
    "zero 1, microbatches, meta device": "--use-distributed-optimizer --global-batch-size 16 --init-model-with-meta-device",
    "bf16": f"{SHARDED} --bf16 --grad-reduce-in-bf16",
    "bf16 in two halves": f"{SHARDED} --bf16 --use-precision-aware-optimizer --use-distributed-optimizer",
    "sgd": f"{SHARDED} --optimizer sgd --clip-grad 0.01",
}


@dataclass(frozen=True)
class Fault:
    """What is planted, and what the audit says of it first."""

    first: str
    """Words of the report's first line, in their order."""

    plant: Callable[[pytest.MonkeyPatch], None] = lambda patch: None
    of_model: Callable[[torch.nn.Module], None] = lambda model: None
    flags: str = SHARDED


def _a_group_of_this_rank_alone(patch: pytest.MonkeyPatch) -> None:
    """Weights are sharded over this rank; data are still divided among all."""
    from megatron.training.launch import pretrain

    make = pretrain.process_groups  # type: ignore[attr-defined]

    def wrong(*settings: Any) -> Any:
        (alone,) = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank() :][:1]
        return dataclasses.replace(make(*settings), dp_cp=alone)

    patch.setattr(pretrain, "process_groups", wrong)


def _remember_outputs(model: torch.nn.Module) -> None:
    """A buffer takes a running mean of what this rank has seen, as batch normalisation does."""
    norm: Any = model.get_submodule("decoder.final_layernorm")
    norm.register_buffer("mean", torch.zeros(()))

    def remember(module: Any, _: Any, output: torch.Tensor) -> None:
        module.mean.lerp_(output.detach().square().mean(), 0.1)

    model.get_submodule("output_layer").register_forward_hook(lambda _, __, output: remember(norm, _, output[0]))


def _reverse_layers_on_the_last_rank(model: torch.nn.Module) -> None:
    class Reversed(torch.nn.ModuleList):
        def __iter__(self) -> Any:
            return reversed(list(self._modules.values()))

    if dist.get_rank() == dist.get_world_size() - 1:
        model.get_submodule("decoder").layers.__class__ = Reversed


FAULTS = {
    "scale": Fault("step 1 the gradient times what it must be", planted_faults.averages_over_one_rank_fewer),
    "missed sync": Fault(
        "step 2 the loss", planted_faults.model_weights_stay_old, flags="--use-distributed-optimizer --bf16"
    ),
    "dropped reduction": Fault("step 1 the gradient decoder.layers.", planted_faults.a_reduction_is_dropped),
    "unsynchronised buffers": Fault("step 1 the buffer decoder.final_layernorm.mean", of_model=_remember_outputs),
    "wrong group": Fault("step 1 the gradient embedding", _a_group_of_this_rank_alone),
    "another order": Fault(
        "step 1 all ranks must run the same units in one order layers.1. on ranks",
        of_model=_reverse_layers_on_the_last_rank,
    ),
}


def _audits(lines: dict[str, str], faults: dict[str, str]) -> dict[str, str]:
    """The reports of audits one after the other, on these ranks; ``faults`` by the name of a line."""
    return {name: _audit(flags.split(), FAULTS.get(faults.get(name, ""))) for name, flags in lines.items()}


def _audit(flags: list[str], fault: Fault | None) -> str:
    import pretrain_gpt
    from megatron.core.datasets.mock_corpus import MockGPTLowLevelDataset
    from tools.audit import audit_on_rank

    MockGPTLowLevelDataset.size, MockGPTLowLevelDataset.max_sequence_length = 600, 14
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)

    def model_provider(*options: Any, **named: Any) -> torch.nn.Module:
        model = pretrain_gpt.model_provider(*options, **named)
        if fault is not None:
            fault.of_model(model)
        return model

    script = SimpleNamespace(
        model_provider=model_provider,
        datasets_provider=pretrain_gpt.datasets_provider,
        forward_step=pretrain_gpt.forward_step,
    )
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() > 0:
            patch.setenv("LOCAL_RANK", "1")
        if fault is not None:
            fault.plant(patch)
        return str(audit_on_rank(script, flags, Path(folder[0])))


@pytest.fixture(scope="module")
def on_two_ranks() -> dict[str, str]:
    lines = {name: f"{TINY} {flags}" for name, flags in _TWO_RANKS.items()}
    lines |= {name: f"{TINY} {fault.flags}" for name, fault in FAULTS.items()}
    reports: dict[str, str] = run_ranks(2, _audits, lines, {name: name for name in FAULTS})[0]
    return reports


@pytest.fixture(scope="module")
def on_four_ranks() -> dict[str, str]:
    assert all(CELLS[name].ranks == 4 for name in _SPLIT_CELLS)
    reports: dict[str, str] = run_ranks(4, _audits, {name: " ".join(CELLS[name].argv) for name in _SPLIT_CELLS}, {})[0]
    return reports


@pytest.mark.parametrize("name", _TWO_RANKS)
def test_what_is_right_agrees(on_two_ranks: dict[str, str], name: str) -> None:
    assert on_two_ranks[name].startswith("sharded and unsharded training agree in 3 steps"), on_two_ranks[name]


@pytest.mark.parametrize("name", _SPLIT_CELLS)
def test_a_model_that_is_split_agrees_with_the_whole_one(on_four_ranks: dict[str, str], name: str) -> None:
    assert on_four_ranks[name].startswith("sharded and unsharded training agree in 3 steps"), on_four_ranks[name]


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(on_two_ranks: dict[str, str], name: str) -> None:
    report = on_two_ranks[name]
    first = report.splitlines()[0].removeprefix("sharded training differs from unsharded: in ")
    assert first != report.splitlines()[0], report
    at = 0
    for word in FAULTS[name].first.split():
        at = first.find(word, at)
        assert at >= 0, (word, report)


def _run(*arguments: str) -> tuple[int, str]:
    command = [warm_python(), str(TOOL), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400, cwd=TOOL.parents[1])
    return done.returncode, done.stdout + done.stderr


def test_the_launcher_ends_with_a_killed_audit() -> None:
    command = [warm_python(), str(TOOL), "--", "sh", "-c", "echo started; exec sleep 600", "pretrain_gpt.py"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=TOOL.parents[1]) as audit:
        assert audit.stdout is not None
        assert audit.stdout.readline() == "started\n"
        audit.kill()
        assert audit.stdout.read() == "", "it ends when the launcher, which has it too, has ended"


_TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 2 pretrain_gpt.py"


def test_the_exit_status_says_that_something_differs() -> None:
    """A tolerance that the order of sums does not keep stands for a fault; tests/test_docs.py runs a command that agrees."""
    status, text = _run("--tolerance", "1e-12", "--", *f"{warm_python()} {_TORCHRUN} {TINY} {SHARDED}".split())
    assert status == 1 and "sharded training differs from unsharded: in step 1 the " in text, text


def test_what_cannot_be_audited_ends_with_status_2() -> None:
    status, text = _run("--", "torchrun", "train.py")
    assert status == 2 and "must name pretrain_gpt.py, got 'torchrun train.py'" in text, text
    status, text = _run("--", "pretrain_gpt.py", *TINY.split(), "--no-such-flag")
    assert status == 2 and "pretrain_gpt.py: error: " in text and "--no-such-flag" in text, text
    status, text = _run("--", "pretrain_gpt.py", *TINY.split(), *SHARDED.split(), "--optimizer", "muon")
    assert status == 2 and "got --optimizer muon; add --optimizer adam" in text, text


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("--steps 0 -- pretrain_gpt.py", "--steps must be at least 1, got 0"),
        ("--tolerance nan -- pretrain_gpt.py", "--tolerance must be a finite number"),
        ("-- no-such-launcher pretrain_gpt.py", "'no-such-launcher' must be a program"),
        ("--folder pretrain_gpt.py -- pretrain_gpt.py", "--folder must be a folder that can be written"),
    ],
)
def test_a_call_that_cannot_be_served_is_refused(
    line: str, problem: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tools.audit import main

    monkeypatch.chdir(TOOL.parents[1])
    assert main(line.split()) == 2 and problem in capsys.readouterr().err
