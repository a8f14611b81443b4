"""Each reader of a JSON file names a file that is nested too deeply, or is no file, in an error of its own kind, at once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.core.dist_checkpointing.core import CheckpointingException, maybe_load_config
from megatron.core.distributed.fsdp.huggingface import load_pretrained  # noqa: F401 (imported first, as users do)
from megatron.core.distributed.fsdp.huggingface.safetensors_files import read_header
from megatron.core.distributed.fsdp.huggingface.safetensors_files import read_json as read_object
from megatron.core.distributed.fsdp.overlap_report import read_report
from megatron.core.distributed.fsdp.tuner.tuned_file import TunedFile
from megatron.core.tokenizers.huggingface_tokenizer import _read_settings
from megatron.core.tokenizers.megatron_tokenizer import MegatronTokenizer
from megatron.core.tokenizers.tiktoken_tokenizer import _read_ranks
from megatron.training.cli.flags_data import _blends
from megatron.training.formats.megatron_lm.distributed import _check_backend
from megatron.training.planner.rates import DeviceRates
from megatron.training.telemetry.trace_summary import read_trace
from megatron.training.telemetry.watch.history import History

_DEEP = ["[" * 100_000, '{"a":' * 500 + "1" + "}" * 500]
_READERS: dict[str, Callable[[Path], Any]] = {
    "metadata.json": lambda path: maybe_load_config(path.parent),
    "model.safetensors.index.json": read_object,
    "overlap_report.json": read_report,
    "tuned.json": TunedFile,
    "tokenizer_config.json": lambda path: _read_settings(str(path.parent)),
    "tokenizer_metadata.json": lambda path: MegatronTokenizer.from_pretrained(metadata_path=str(path)),
    "tiktoken.json": lambda path: _read_ranks(str(path), 1),
    "blends.json": lambda path: _blends(path, of_splits=True),
    "backend.json": _check_backend,
    "rates.json": DeviceRates.load,
    "trace.json": read_trace,
}
_IS_NAMED_BY_CALLER = {"blends.json", "trace.json"}
_PASSES_OVER_OTHERS = {"metadata.json", "tokenizer_config.json"}
"""What is no regular file is none of theirs."""


@pytest.mark.parametrize("text", _DEEP, ids=["too deep for Python", "too deep for what follows"])
@pytest.mark.parametrize("name", _READERS)
def test_json_that_is_nested_too_deeply_is_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises((ValueError, CheckpointingException)) as raised:
        _READERS[name](tmp_path / name)
    assert "others" in str(raised.value), raised.value
    assert name in _IS_NAMED_BY_CALLER or str(tmp_path / name) in str(raised.value)


@pytest.mark.parametrize("name", _READERS)
def test_a_named_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    if name in _PASSES_OVER_OTHERS:
        assert not _READERS[name](tmp_path / name)
        return
    with pytest.raises((ValueError, FileNotFoundError), match=name):
        _READERS[name](tmp_path / name)


def test_a_header_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    path, header = tmp_path / "model.safetensors", _DEEP[0].encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match=f"{path} must be a safetensors file"):
        read_header(path)


def test_a_line_of_a_history_that_is_nested_too_deeply_is_passed_over(tmp_path: Path) -> None:
    history = History(tmp_path / "h.jsonl")
    history.add_line(1, 1e9, {"loss": 1.0})
    history.write()
    with open(history.path, "a") as file:
        file.write("\n".join([*_DEEP, json.dumps({"kind": "line"})]) + "\n")
    again = History(history.path)
    again.read()
    assert len(again.points) == 1
