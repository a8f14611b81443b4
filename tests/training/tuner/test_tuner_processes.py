"""The tuner with real ranks and processes: what it leaves behind is its choice, whatever became of the candidates."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from megatron.training.tuner.flags_of_choices import flags_of
from tests.support.rank_processes import Start, read_until, wait_until_gone
from tests.support.rank_processes import start as start
from tests.support.tiny_run import SHARDED, TINY
from tests.test_docs import DOCS, blocks, run

pytestmark = pytest.mark.slow

_SCRIPT = """
import os, sys, time
import torch
import pretrain_gpt

plain = pretrain_gpt.forward_step

def forward_step(batch, model):
    config = model.ddp_config
    if config.fsdp_forward_prefetch_depth == 3 and os.environ["RANK"] == "1":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 5 GiB")
    if config.suggested_communication_unit_size and os.environ["RANK"] == "0":
        os._exit(7)
    time.sleep(0.01 if config.fsdp_forward_prefetch_depth == 2 else 0.1)
    time.sleep(0.3 if config.fsdp_transport == "peer_copy" else 0.0)
    return plain(batch, model)

if __name__ == "__main__":
    pretrain_gpt.forward_step = forward_step
    pretrain_gpt.run_script(pretrain_gpt.main, sys.argv[1:])
"""


def _train(start: Start, script: Path, flags: str) -> str:
    processes = start(f"{TINY} {SHARDED} --overlap-param-gather --overlap-grad-reduce {flags}", script=str(script))
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    return outputs[0]


def _exact(output: str) -> list[tuple[str, str]]:
    found = re.findall(r"exact loss: (\S+) .*exact norm: (\S+) ", output)
    assert len(found) == 4
    return found


def _take(folder: Path) -> dict[str, bytes]:
    """Return the last checkpoint of a folder, to the byte: weights, optimizer, random generators, counters; delete the folder."""
    files = {path.name: path.read_bytes() for path in (folder / "iter_0000004").iterdir()}
    shutil.rmtree(folder)
    del files[".saved-by-megatron-fsdp"]  # a random name of the run
    assert len(files) >= 4
    return files


def test_a_tuned_run_is_to_the_bit_the_run_with_the_flags_it_chose(start: Start, tmp_path: Path) -> None:
    """With a candidate that runs out of memory on one rank, one whose process ends, and faster and slower ones."""
    script, file = tmp_path / "script.py", tmp_path / "tuned.json"
    script.write_text(_SCRIPT)
    tuning = f"--fsdp-tune {file} --fsdp-tune-seconds 200"
    save = f"--save {tmp_path}/saved"  # one place, since checkpoints have the flags
    first = _train(start, script, f"{tuning} {save}")
    saved = _take(tmp_path / "saved")
    table = first.split("fsdp tune: measured\n")[1].split(" fsdp tune: chosen")[0]
    assert re.search(
        r"--fsdp-forward-prefetch-depth 3 \S+ 3 +out of memory: .*Tried to allocate 5 GiB \(rank 1\)", table
    )
    assert re.search(r"--suggested-communication-unit-size \d+ +its process ended with status 7.* \(rank 0\)", table)
    assert re.search(r"--fsdp-transport peer_copy +[89]\d\d\.\d+ ms a step", table)
    (entry,) = json.loads(file.read_text())["entries"]
    chosen = entry["settings"]
    assert chosen["fsdp_forward_prefetch_depth"] == 2 and chosen["fsdp_transport"] == "nccl"
    assert "suggested_communication_unit_size" not in chosen

    by_hand = _train(start, script, f"{' '.join(flags_of(chosen))} {save}")
    assert _take(tmp_path / "saved") == saved
    again = _train(start, script, f"{tuning} {save}")
    assert f"the settings of {file}, measured 20" in again and "fsdp tune: measured" not in again
    assert _exact(first) == _exact(by_hand) == _exact(again)
    assert _take(tmp_path / "saved") == saved

    refused = start(f"{TINY} {SHARDED} --fsdp-tune {script}")
    outputs = [process.communicate(timeout=120)[0] for process in refused]
    assert [process.returncode for process in refused] == [2, 2], outputs
    assert sum(output.count("must be a file of tuned settings") for output in outputs) == 1


@pytest.mark.parametrize("victims", [(0, 1), (0,), (1,)])
def test_no_trial_outlives_its_killed_rank(start: Start, tmp_path: Path, victims: tuple[int, ...]) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    flags = f"{TINY} {SHARDED} --overlap-param-gather --overlap-grad-reduce --fsdp-tune {tmp_path}/tuned.json"
    processes = start(flags, script=str(script))
    read_until(processes[0], "ms a step")
    for victim in victims:
        processes[victim].kill()
    wait_until_gone([processes[victim] for victim in victims], 120.0)


def test_the_micro_batch_size_is_chosen_on_request_with_the_same_global_batch(start: Start, tmp_path: Path) -> None:
    flags = f"--fsdp-tune {tmp_path}/tuned.json --fsdp-tune-seconds 60 --fsdp-tune-also micro-batch-size"
    others = "--fsdp-transport nccl --suggested-communication-unit-size 10 --fsdp-memory-budget 1000 --create-all-gather-group --num-workers 1"
    output = _train(start, Path("pretrain_gpt.py"), f"{flags} {others}")
    assert re.search(r"--micro-batch-size 4 +\d", output) and "consumed samples:           32 " in output


def test_any_module_is_tuned(tmp_path: Path) -> None:
    """The block of docs/tuning.md."""
    (tmp_path / "script.py").write_text(blocks(DOCS / "tuning.md", "python")[0])
    printed = run(["torchrun", "--nproc-per-node", "2", "script.py"], tmp_path, python=sys.executable)
    assert "fsdp tune: chosen: " in printed and "prefetch_depth=2" in printed and "budget=" in printed
    assert (tmp_path / "tuned.json").exists()
