"""Largest differences between logits of transformers and ours, by way: ``python -m tests.support.logits_table``."""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path
from typing import Any

import torch

from megatron.core.distributed.fsdp.checkpoint import EXTRA_STATE, CheckpointReader
from megatron.training.formats.megatron_lm import open_distributed
from megatron.training.formats.recognise import find_foreign
from tests.support.huggingface_models import FOLDER, NAMES, VOCAB_SIZE, expected, logits_of, stored_tensors
from tools.checkpoint import convert


def _converted(source: Path, target: Path, *options: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        assert convert.main([str(source), str(target), *options]) == 0


def row(name: str, folder: Path) -> list[Any]:
    """Return the differences of a model, read directly and from each format, and how its weights come back from ours."""
    tokens, logits = expected(name)
    found = find_foreign(FOLDER / name)
    assert found is not None
    architecture = found.settings(padded_vocab_size=64)
    differences = [(logits_of(found.reader(architecture), architecture, tokens) - logits).abs().max().item()]
    for kind in ("torch_dist", "fsdp_dtensor"):
        target = folder / kind
        _converted(FOLDER / name, target, "--to", kind, "--padded-vocab-size", "64")
        foreign = open_distributed(target / "iter_0000000")
        assert foreign is not None
        stored = CheckpointReader(target / "iter_0000000").values([f"{EXTRA_STATE}architecture"])
        settings = stored[f"{EXTRA_STATE}architecture"]
        differences.append((logits_of(foreign.reader(settings), settings, tokens) - logits).abs().max().item())
    _converted(FOLDER / name, folder / "own", "--padded-vocab-size", "64")
    _converted(folder / "own", folder / "back", "--to", "huggingface", "--vocab-size", str(VOCAB_SIZE))
    before, after = stored_tensors(FOLDER / name), stored_tensors(folder / "back")
    same = before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    return [*differences, "bit for bit" if same else "DIFFERS"]


def main() -> None:
    """Print the table of all models."""
    print("| model of transformers | `--load` | by `torch_dist` | by `fsdp_dtensor` | weights there and back |")
    print("|---|---|---|---|---|")
    for name in NAMES:
        with tempfile.TemporaryDirectory() as folder:
            *differences, same = row(name, Path(folder))
        print(f"| {name} | {' | '.join(f'{difference:.1e}' for difference in differences)} | {same} |")


if __name__ == "__main__":
    main()
