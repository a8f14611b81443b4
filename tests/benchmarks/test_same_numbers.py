"""Two versions count as the same only if every logged number and every entry of the checkpoint has the same bits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from benchmarks.same_numbers import LINES, compare, described


def _record() -> dict[str, Any]:
    tensor = torch.arange(6.0)
    line = {
        "device": "cpu",
        "ranks": 2,
        "flags": "--lr 1",
        "scalars": {"lm loss": {"1": (1.5).hex(), "2": (0.1).hex()}, "grad-norm": {"1": (2.0).hex(), "2": (3.0).hex()}},
        "checkpoint": {"weight": described(tensor), "step": described(2)},
        "checkpoint_sha256": "a",
    }
    return {"checkout": "somewhere", "commit": "abc", "torch": torch.__version__, "lines": {"no_shard": line}}


def test_equal_records_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    other = _record()
    other["commit"] = other["checkout"] = "another"
    assert compare(_record(), other, []) == 0
    assert "same: 4 logged numbers, 2 entries" in capsys.readouterr().out


@pytest.mark.parametrize("change", ["loss", "weight", "flags", "missing"])
def test_the_last_bit_is_a_difference(change: str, capsys: pytest.CaptureFixture[str]) -> None:
    other = copy.deepcopy(_record())
    line = other["lines"]["no_shard"]
    if change == "loss":
        line["scalars"]["lm loss"]["2"] = (0.1 + 2**-56).hex()
    elif change == "weight":
        line["checkpoint"]["weight"] = described(torch.arange(6.0).nextafter(torch.tensor(7.0)))
    elif change == "flags":
        line["flags"] = "--lr 2"
    else:
        del other["lines"]["no_shard"]
    assert compare(_record(), other, []) == 1
    assert "no_shard" in capsys.readouterr().out


def test_every_way_to_split_a_model_has_a_launch_line() -> None:
    flags = " ".join(line.flags for line in LINES.values())
    for split in ("tensor-model", "context", "pipeline-model", "expert-model"):
        assert f"--{split}-parallel-size 2" in flags
    assert "--num-distributed-optimizer-instances 2" in flags and "--outer-dp-sharding-strategy optim" in flags
