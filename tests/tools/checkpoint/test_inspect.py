"""The tool lists checkpoints and compares two; its exit status says whether they differ."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.fsdp import fully_shard, save_checkpoint
from megatron.core.distributed.fsdp.flat_optimizer.flat_adamw import FlatAdamW
from tests.support.launch import run_ranks

TOOL = Path(__file__).parents[3] / "tools" / "checkpoint" / "inspect.py"


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))


def save_all(folder: str) -> None:
    base = Path(folder)
    model = fully_shard(_model())
    optimizer = FlatAdamW(model.parameters())
    extra = {"state": {"iteration": 7}}
    save_checkpoint(model, optimizer, base / "run" / "iter_0000007", extra_state=extra)
    (base / "run" / "latest_checkpointed_iteration.txt").write_text("7")
    save_checkpoint(model, optimizer, base / "same", extra_state={"other": dist.get_rank()})
    with torch.no_grad():
        model.get_parameter("1.bias").add_(0.5)
    save_checkpoint(model, optimizer, base / "values")
    save_checkpoint(model, None, base / "fewer")
    wider = fully_shard(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4)))
    save_checkpoint(wider, None, base / "shapes")
    not_finite = fully_shard(_model())
    with torch.no_grad():
        not_finite.get_parameter("0.bias").fill_(float("nan"))
    save_checkpoint(not_finite, None, base / "nan")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    run_ranks(2, save_all, str(folder))
    return folder


def _run(*arguments: Path | str) -> tuple[int, str]:
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, cwd="/")
    return result.returncode, result.stdout + result.stderr


def _main(capsys: pytest.CaptureFixture[str], *arguments: Path | str) -> tuple[int, str]:
    """Run the tool in this process, which is faster than starting another one."""
    import importlib.util

    specification = importlib.util.spec_from_file_location("checkpoint_inspect", TOOL)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    status: int = module.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def test_the_script_lists_the_latest_iteration_of_a_run(saved: Path) -> None:
    """As a script: its own name must not hide the standard library's module from what it imports."""
    status, text = _run(saved / "run")
    assert status == 0, text
    assert "iter_0000007 (iteration 7)" in text
    row = next(line.split() for line in text.splitlines() if line.startswith("0.weight"))
    assert row[:6] == ["0.weight", "[5,", "3]", "float32", "60", "1"] and row[6:] == ["__0_0.distcp"]
    assert "optimizer.state.1.bias.exp_avg " in text and "optimizer.param_groups  (plain value)" in text
    assert "model: 4 tensors, 32 elements, 128 bytes" in text and "file .metadata: " in text


def test_a_reader_may_leave_early(saved: Path) -> None:
    """As head does."""
    command = [sys.executable, str(TOOL), str(saved / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/") as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""


def test_names_can_be_selected(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = _main(capsys, saved / "same", "--only", "0.*")
    assert status == 0 and "0.bias" in text and "1.bias" not in text and "(iteration" not in text


def test_equal_tensors_are_equal_whatever_else_differs(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = _main(capsys, saved / "run", saved / "same")
    assert status == 0 and "16 tensors: all equal, bit for bit" in text, text


def test_differences_are_named(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = _main(capsys, saved / "same", saved / "values")
    assert status == 1 and text == "1.bias: 2 of 2 elements differ, by 0.5 at most\n16 tensors: 1 differ\n"
    status, text = _main(capsys, saved / "values", saved / "fewer")
    assert status == 1 and f"optimizer.state.0.weight.exp_avg: only in {saved / 'values'}" in text
    status, text = _main(capsys, saved / "fewer", saved / "shapes", "--only", "1.*")
    assert status == 1 and "1.weight: shape [2, 5] and [4, 5]" in text and "2 tensors: 2 differ" in text


def test_damage_is_found_when_asked_for(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also in what the listing does not read."""
    copy = tmp_path / "copy"
    shutil.copytree(saved / "fewer", copy)
    status, text = _main(capsys, copy, "--verify", "--only", "none")
    assert status == 0 and "all of it agrees with its checksums" in text
    data = copy / "__1_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 4
    data.write_bytes(content)
    status, text = _main(capsys, copy, "--verify")
    assert status == 2 and str(data) in text and "must have the checksum" in text
    assert _main(capsys, copy)[0] == 0


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("own", [True, False])
def test_a_payload_is_not_run(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], own: bool) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(saved / "fewer", copy)
    (copy / ".metadata").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    if not own:
        (copy / "checkpoint.json").unlink()
    status, text = _main(capsys, copy)
    assert status == 2 and str(copy / ".metadata") in text
    assert not (tmp_path / "ran").exists()


def test_what_is_no_number_is_compared_bit_for_bit(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _main(capsys, saved / "nan", saved / "nan")[0] == 0
    status, text = _main(capsys, saved / "nan", saved / "fewer")
    assert status == 1 and "0.bias: 5 of 5 elements differ, by nan at most" in text


def test_what_cannot_be_read_is_an_error(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = _main(capsys, tmp_path / "nothing")
    assert status == 2 and "got nothing there" in text
    status, text = _main(capsys, saved / "same", tmp_path)
    assert status == 2 and "must be a complete checkpoint" in text
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    status, text = _main(capsys, tmp_path)
    assert status == 2 and "must hold the number of an iteration, got 'release'" in text
    status, text = _main(capsys, saved / "same", saved / "same", "--only", "absent*")
    assert status == 2 and "matches none in either checkpoint" in text
