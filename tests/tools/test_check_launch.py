"""The check of launch lines: fates, sizes and reasons without ranks, and an exit status that says whether a line would start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch_lines import SMALLEST
from tools.check_launch import main

TOOL = Path(__file__).parents[2] / "tools" / "check_launch.py"
LINE = f"""{SMALLEST}
--global-batch-size 16 --tokenizer-type NullTokenizer --vocab-size 100 --tensor-model-parallel-size 2
--pipeline-model-parallel-size 2 --use-megatron-fsdp --tp-comm-overlap --bf16 --use-mcore-models true
--data-cache-path no/such/path --wandb-project p --wandb-exp-name e
""".split()


def test_what_would_happen_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--ranks", "8", "--", *LINE, "--fp8-format", "hybrid", "--kv-channels", "8"]) == 0
    printed = capsys.readouterr().out
    for words in (
        "in effect:  --num-layers 2",
        "always so:  --use-mcore-models (models have",
        "said once:  --tp-comm-overlap",
        "ranks: 8 = tensor 2 * context 1 * pipeline 2 * data 2",
        "group of data: 2 ranks, the first one 0 2",
        "sharding: optim_grads_params, over 2 ranks",
        "global batch: 16 samples = 4 microbatches * 2 ranks * 2; 128 tokens",
        "length: 4 iterations, 64 samples",
        # 2 layers of 16 * 16 * 16 + 16 * 16, with heads of 8, embeddings of 128 ids and 8 positions, the last norm
        f"model: {2 * (16 * 256 + 16 * 16) + 136 * 16 + 2 * 16:,} parameters with 128 ids",
        "index of the training data: about 0.0 GiB of memory for one rank of each host while it is built, and of disk in no/such",
        "needs wandb, which is not usable here",
        "needs transformer-engine, which is not usable here",
        "--tp-comm-overlap: tensor-parallel communication is not overlapped",
        "the run would start",
    ):
        assert words in printed, words


def test_all_reasons_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--ranks", "6", "--", *LINE, "--enable-msc", "--num-attention-heads", "5", "--lr", "fast"]) == 1
    printed = capsys.readouterr().out
    reasons = printed.split("the run would not start, for ")[1].splitlines()
    assert reasons[0] == "5 reasons:"
    assert [reason.split()[0] for reason in reasons[1:]] == [
        "--enable-msc",
        "--lr",
        "the",  # number of ranks
        "--hidden-size",
        "--num-attention-heads",
    ]


def test_parameters_are_counted_for_each_id_of_a_tokenizer_that_is_not_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = " ".join(LINE).replace("NullTokenizer --vocab-size 100", "HuggingFaceTokenizer --tokenizer-model no/such")
    assert main(["--ranks", "8", "--", *line.split()]) == 0
    assert "parameters, and 16 for each id of the tokenizer, padded to a multiple of 128" in capsys.readouterr().out


def test_the_script_runs_from_anywhere(tmp_path: Path) -> None:
    command = [sys.executable, str(TOOL), "--ranks", "1", "--", "--num-layers"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and "--num-layers takes one value, got none" in done.stdout and done.stderr == ""


def test_parameters_of_interleaved_stages_are_those_of_the_whole_model(capsys: pytest.CaptureFixture[str]) -> None:
    """How stages and ranks divide it shapes nothing."""
    words = f"{SMALLEST} --num-layers 4 --global-batch-size 16 --tokenizer-type NullTokenizer --vocab-size 100"
    split = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --tensor-model-parallel-size 2"
    counts = []
    for flags in ("", split, "--mtp-num-layers 1"):
        assert main(["--ranks", "4", "--", *words.split(), *flags.split()]) == 0
        counts += [line for line in capsys.readouterr().out.splitlines() if line.startswith("  model:")]
    assert counts[1].startswith(counts[0]) and " parameters with 128 ids" in counts[0]
    number, with_more = (int(count.split()[1].replace(",", "")) for count in (counts[0], counts[2]))
    assert with_more > number, "with a layer of multi-token prediction"
