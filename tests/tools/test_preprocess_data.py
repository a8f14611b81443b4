"""JSON lines become corpora: complete, in order, or not at all."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import numpy
import pytest

from megatron.core.datasets.indexed_dataset import IndexedDataset

TOOL = Path(__file__).parents[2] / "tools" / "preprocess_data.py"


def _write(path: Path, documents: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


def _run(source: Path | str, prefix: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), "--input", str(source), "--output-prefix", str(prefix), *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def _documents(prefix: str) -> list[list[int]]:
    corpus = IndexedDataset(prefix)
    return [corpus[number].tolist() for number in range(len(corpus))]


def test_documents_of_all_keys_in_order(tmp_path: Path) -> None:
    source = _write(tmp_path / "in.jsonl", [{"text": f"döc {n}", "title": str(n), "id": n} for n in range(5)])
    done = _run(source, tmp_path / "new" / "out", "--json-keys", "text", "title", "--append-eod")
    assert done.returncode == 0, done.stderr
    assert "processed 5 documents" in done.stdout and "out_title_document.bin" in done.stdout
    expected = [[*f"döc {n}".encode(), 256] for n in range(5)]
    assert _documents(str(tmp_path / "new" / "out_text_document")) == expected
    assert _documents(str(tmp_path / "new" / "out_title_document")) == [[48 + n, 256] for n in range(5)]
    assert IndexedDataset(str(tmp_path / "new" / "out_text_document")).index.dtype is numpy.uint16


def test_workers_do_not_change_the_output(tmp_path: Path) -> None:
    """More batches than are read ahead (4 for each worker), of documents of very different lengths."""
    lines = [{"text": f"{n} " * (1 if n % 7 else 13_000)} for n in range(1500)]
    source = _write(tmp_path / "in.jsonl", lines)
    for workers in ("1", "2"):
        done = _run(source, tmp_path / workers, "--workers", workers, "--append-eod", "--log-interval", "500")
        assert done.returncode == 0, done.stderr
        assert "processed" in done.stderr
    for ending in (".bin", ".idx"):
        one, two = (tmp_path / f"{workers}_text_document{ending}" for workers in ("1", "2"))
        assert one.read_bytes() == two.read_bytes()


def test_terminals_see_a_bar(tmp_path: Path) -> None:
    source = _write(tmp_path / "in.jsonl", [{"text": "a"}] * 5)
    terminal, end = pty.openpty()
    command = [sys.executable, str(TOOL), "--input", str(source), "--output-prefix", str(tmp_path / "out")]
    assert subprocess.run(command, stderr=end, check=False, timeout=300).returncode == 0
    assert b"5 documents" in os.read(terminal, 1 << 16)
    os.close(end)
    os.close(terminal)


def test_documents_as_megatron_writes_them(tmp_path: Path) -> None:
    """Without ends of documents; a list of texts is one document; an empty text is a document without sequences."""
    documents: list[object] = [{"text": ["1 2", "3"]}, {"text": ""}, {"text": "4"}]
    source = _write(tmp_path / "in.jsonl", documents)
    done = _run(source, tmp_path / "out", "--tokenizer-type", "NullTokenizer", "--vocab-size", "70000")
    assert done.returncode == 0, done.stderr
    corpus = IndexedDataset(str(tmp_path / "out_text_document"))
    assert _documents(str(tmp_path / "out_text_document")) == [[1, 2], [3], [4]]
    assert corpus.document_indices.tolist() == [0, 2, 2, 3]
    assert corpus.index.dtype is numpy.int32


def test_patterns_read_files_in_sorted_order(tmp_path: Path) -> None:
    for name in ("b", "a"):
        _write(tmp_path / f"{name}.jsonl", [{"text": name}])
    assert _run(str(tmp_path / "*.jsonl"), tmp_path / "out").returncode == 0
    assert _documents(str(tmp_path / "out_text_document")) == [[97], [98]]


def test_existing_output_is_kept_without_the_flag(tmp_path: Path) -> None:
    source = _write(tmp_path / "in.jsonl", [{"text": "a"}])
    assert _run(source, tmp_path / "out").returncode == 0
    _write(source, [{"text": "b"}])
    refused = _run(source, tmp_path / "out")
    assert refused.returncode == 1
    assert "out_text_document.bin exists already" in refused.stderr and "--overwrite" in refused.stderr
    assert _documents(str(tmp_path / "out_text_document")) == [[97]]
    assert _run(source, tmp_path / "out", "--overwrite").returncode == 0
    assert _documents(str(tmp_path / "out_text_document")) == [[98]]


BAD_LINES = {
    '{"text": ': "each line must be JSON, got",
    "[1]": "each line must be a JSON object",
    '{"title": "a"}': "each line must have the key 'text' (see --json-keys), got ['title']",
    '{"text": 5}': "'text' must hold text or a list of texts, got 5",
}


@pytest.mark.parametrize("line", BAD_LINES)
@pytest.mark.parametrize("workers", ["1", "2"])
def test_bad_lines_are_named_and_leave_nothing(line: str, workers: str, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "a"}\n\n' + line + "\n")
    done = _run(source, tmp_path / "out", "--workers", workers)
    assert done.returncode == 1
    assert f"in.jsonl:3: {BAD_LINES[line]}" in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_files_of_gpt2_are_read_under_the_names_of_megatron_lm(tmp_path: Path) -> None:
    tokens = [*"abc", "ab", "<|endoftext|>"]
    (tmp_path / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    source = _write(tmp_path / "in.jsonl", [{"text": "abc"}, {"text": "cab"}])
    files = ("--vocab-file", str(tmp_path / "vocab.json"), "--merge-file", str(tmp_path / "merges.txt"))
    done = _run(source, tmp_path / "out", "--tokenizer-type", "GPT2BPETokenizer", *files, "--append-eod")
    assert done.returncode == 0, done.stderr
    corpus = IndexedDataset(str(tmp_path / "out_text_document"))
    assert [corpus[i].tolist() for i in range(len(corpus))] == [[3, 2, 4], [2, 3, 4]]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--split-sentences"], "--split-sentences is not served: documents are not split"),
        (["--vocab-file", "x"], "GPT2BPETokenizer needs --merge-file, got none"),
        (
            ["--sft-tokenizer-prompt-format", "chatml"],
            "must be one of nemotron-h-aligned, nemotron-nano-v2, identity, default",
        ),
        (["--partitions", "0"], "--partitions must be at least 1, got 0"),
        (["--workers", "0"], "--workers must be positive, got 0"),
        (["--json-keys", "a", "a"], "--json-keys must differ"),
        (["--tokenizer-type", "ByteTokenizer"], "the nearest is ByteLevelTokenizer"),
        (["--tokenizer-type", "HuggingFaceTokenizer"], "needs --tokenizer-model"),
    ],
)
def test_wrong_flags_are_refused_with_the_reason(flags: list[str], message: str, tmp_path: Path) -> None:
    done = _run(_write(tmp_path / "in.jsonl", [{"text": "a"}]), tmp_path / "out", *flags)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_inputs_without_documents_are_refused(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("\n\n")
    assert "must hold documents, got only empty lines" in _run(tmp_path / "in.jsonl", tmp_path / "out").stderr
    assert "--input must name a file or a pattern" in _run(tmp_path / "none*", tmp_path / "out").stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_killed_run_leaves_no_corpus(tmp_path: Path) -> None:
    """Killed while it writes: the old output is whole, and what was written has a name that no reader opens."""
    old = _write(tmp_path / "old.jsonl", [{"text": "old"}])
    assert _run(old, tmp_path / "out").returncode == 0
    pipe = tmp_path / "in.jsonl"
    os.mkfifo(pipe)
    flags = ["--overwrite", "--input", str(tmp_path / "in.json[l]"), "--output-prefix", str(tmp_path / "out")]
    with subprocess.Popen([sys.executable, str(TOOL), *flags]) as process, open(pipe, "w") as stream:
        _write_documents(stream)
        deadline = time.monotonic() + 120
        while not _partial_nbytes(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert _partial_nbytes(tmp_path)
        concurrent = _run(old, tmp_path / "out", "--overwrite")
        assert concurrent.returncode == 0 and _partial_nbytes(tmp_path), "an active run keeps its partial file"
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert _documents(str(tmp_path / "out_text_document")) == [list(b"old")]
    after = _run(old, tmp_path / "out", "--overwrite")
    assert "a partial file of a killed run" in after.stderr
    assert not list(tmp_path.glob("*.partial-*")), "the next run removes it"


def _write_documents(stream: TextIO) -> None:
    for number in range(300):
        stream.write(json.dumps({"text": f"new {number} " * 1000}) + "\n")
    stream.flush()


def _partial_nbytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.partial-*"))


def test_dead_worker_is_an_error(tmp_path: Path) -> None:
    """A pool that waits for a process that is gone would wait for ever."""
    pipe = tmp_path / "in.jsonl"
    os.mkfifo(pipe)
    flags = ["--workers", "2", "--input", str(tmp_path / "in.json[l]"), "--output-prefix", str(tmp_path / "out")]
    with subprocess.Popen([sys.executable, str(TOOL), *flags], stderr=subprocess.PIPE, text=True) as process:
        with open(pipe, "w") as stream:
            _write_documents(stream)
            deadline = time.monotonic() + 120
            while len(workers := _workers(process.pid)) < 1 and time.monotonic() < deadline:
                time.sleep(0.01)
            os.kill(workers[0], signal.SIGKILL)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "a worker process died" in errors


def test_workers_end_with_a_killed_run(tmp_path: Path) -> None:
    """Each has both ends of the queue that it waits on, so it would wait for ever."""
    pipe = tmp_path / "in.jsonl"
    os.mkfifo(pipe)
    flags = ["--workers", "2", "--input", str(tmp_path / "in.json[l]"), "--output-prefix", str(tmp_path / "out")]
    with subprocess.Popen([sys.executable, str(TOOL), *flags]) as process, open(pipe, "w") as stream:
        _write_documents(stream)
        deadline = time.monotonic() + 120
        while len(workers := _workers(process.pid)) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.kill()
    while left := [pid for pid in workers if pid in _workers()]:
        assert time.monotonic() < deadline, f"{left} are left"
        time.sleep(0.01)


def _workers(parent: int | None = None) -> list[int]:
    """Return the living processes that multiprocessing has spawned, of one parent or of all."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status, command = (folder / "stat").read_text(), (folder / "cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, started_by = status.rsplit(")", 1)[1].split()[:2]
        if parent in (None, int(started_by)) and state != "Z" and "spawn_main" in command:
            found.append(int(folder.name))
    return found
