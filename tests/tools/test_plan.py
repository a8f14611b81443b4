"""``tools/plan.py`` and ``tools/calibrate.py`` as they are called."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.training.planner import rates_of
from tests.training.planner.tiny_runs import SMALLEST
from tools import calibrate, plan

_LINE = SMALLEST.split()


def test_a_launch_line_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    """As it stands in a script, with pipeline stages; 64 ranks, of which none exists."""
    line = ["torchrun", "--nproc-per-node", "8", "pretrain_gpt.py", *_LINE, "--pipeline-model-parallel-size", "2"]
    line += ["--deterministic-mode", "--use-nccl-ub"]  # which ask for what a CPU has not
    assert plan.main([*line, "--gpus", "64", "--gpu", "h200"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("plan for 64 x NVIDIA H200: pp 2, dp 32, optim_grads_params")
    assert re.search(r"the device +[0-9.]+ +of 139\.8: fits", text)
    assert re.search(r"all-gathers of weights, 32 ranks +[0-9.]+", text)
    assert re.search(r"step, the sum of +[0-9.]+\n    2 microbatches, of it +[0-9.]+\n      computation", text)


def test_flags_without_effect_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Who compares plans with and without a flag must know that it changes nothing."""
    recomputed = "--recompute-granularity selective --recompute-modules layernorm"
    assert plan.main(["--gpus", "1", "--", *_LINE, *recomputed.split()]) == 0
    said = "what the run says of its flags\n  --recompute-modules layernorm: outputs of norms are kept"
    assert said in capsys.readouterr().out


def test_the_documentations_code_plans(capsys: pytest.CaptureFixture[str]) -> None:
    """As it stands in docs/planning.md, for 1,024 ranks."""
    page = (Path(__file__).parents[2] / "docs/planning.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(block, {"flags": [*_LINE, "--global-batch-size", "1024"]})
    assert capsys.readouterr().out.startswith("plan for 1024 x NVIDIA H200: dp 1024")


def test_a_line_that_would_not_start_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--gpus", "3", "--", *_LINE]) == 2
    assert "64" in capsys.readouterr().out


def test_a_tokenizer_that_is_not_there_needs_its_number_of_ids(capsys: pytest.CaptureFixture[str]) -> None:
    """Its files may be on another machine."""
    words = " ".join(_LINE).replace("NullTokenizer --vocab-size 1000", "SentencePieceTokenizer --tokenizer-model PATH")
    assert plan.main(["--gpus", "1", "--", *words.split()]) == 2
    assert "add --vocab-size N" in capsys.readouterr().out
    assert plan.main(["--gpus", "1", "--", *words.split(), "--vocab-size", "1000"]) == 0


def test_a_run_that_this_machine_cannot_plan_is_searched_for_splits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Smaller tensors of other splits may have room: a traceback ended the tool before it looked."""

    def plan_run(*_: object, **__: object) -> None:
        raise MemoryError("no room for 43 GiB")

    monkeypatch.setattr(plan, "plan_run", plan_run)
    monkeypatch.setattr(plan, "search", lambda wish: [])
    assert plan.main(["--gpus", "1", "--search", "--", *_LINE]) == 2
    text = capsys.readouterr().out
    assert (
        "this machine cannot plan the run: no room for 43 GiB" in text
        and "splits that fit, fastest first: none" in text
    )


def test_a_device_without_enough_memory(tmp_path: Path) -> None:
    text = rates_of("h200")
    file = tmp_path / "small.json"
    text.save(file)
    file.write_text(re.sub(r'"memory_nbytes": \d+', '"memory_nbytes": 1000', file.read_text()))
    assert plan.main(["--gpus", "1", "--gpu", str(file), "--", *_LINE]) == 1


@pytest.mark.parametrize(
    ("added", "text", "why"),
    [
        ("--gpu h300", None, "--gpu h300: rates must be a file of tools/calibrate.py, or one of h200, got h300"),
        ("--gpu FILE", None, "No such file"),
        ("--gpu FILE", "{", "must be a JSON file of tools/calibrate.py"),
        ("--gpu FILE", f'{{"name": "a", "memory_nbytes": 1{400 * "0"}}}', "with numbers as memory_nbytes, got 1"),
        ("--gpu FILE", "[]", "must be a file of tools/calibrate.py, got one with list"),
        ("--gpu FILE", '{"name": "x"}', "with numbers as gemm_flops of bf16, got 0"),
        (
            "--gpu FILE",
            '{"name": "x", "gemm_flops": {"bf16": NaN}}',
            "with numbers as gemm_flops of bf16, got {'bf16': nan",
        ),
        ("--network -5", None, "--network must be a number greater than 0, got -5"),
        ("--network 0", None, "--network must be"),
        ("--gpus 0", None, "--gpus must be"),
        ("--gpus-of-host 0", None, "--gpus-of-host must be"),
    ],
)
def test_what_is_no_machine_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], added: str, text: str | None, why: str
) -> None:
    """With another status than a run that does not fit."""
    file = tmp_path / "rates.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit) as ended:
        plan.main(["--gpus", "1", *added.replace("FILE", str(file)).split(), "--", *_LINE])
    assert ended.value.code == 2 and why in capsys.readouterr().err


@pytest.mark.slow
def test_a_machine_is_measured(tmp_path: Path) -> None:
    """On the CPU, where the figures are of no use but show that all of it runs."""
    assert calibrate.main([str(tmp_path / "cpu.json")]) == 0
    rates = rates_of(str(tmp_path / "cpu.json"))
    assert rates.name == "CPU" and {"default", "_norm", "_swiglu_backward"} <= set(rates.memory_bandwidth)
