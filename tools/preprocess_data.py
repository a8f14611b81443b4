"""Conversion of JSON lines to corpora in Megatron's indexed format.

Example::

    python tools/preprocess_data.py --input books.jsonl --output-prefix data/books --append-eod --workers 4

writes ``data/books_text_document.bin`` and ``.idx``: the ``text`` of each line is a document, in the order of the file. The
output appears when it is complete; a killed run leaves none. Flags have Megatron-LM's names and meanings.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import glob
import multiprocessing
import os
import sys
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Works without an installed package too. Worker processes import this file again, so nothing slow (torch) may follow.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy

from megatron.core.child_process import end_with_parent
from megatron.core.datasets.indexed_dataset_builder import IndexedDatasetBuilder
from megatron.core.datasets.indexed_format import DType, get_bin_path, get_idx_path
from megatron.core.regular_file import parse_json
from megatron.core.tokenizers import MegatronTokenizerBase, build_tokenizer
from megatron.training.cli.flags_tokenizer import TOKENIZER_FLAGS, tokenizer_config

BATCH_NBYTES = 1 << 20
"""Bytes of lines that a worker gets at once: enough that communication costs little, few enough to keep all workers busy."""

BATCHES_PER_WORKER = 4
"""Batches that are read ahead for each worker, which bounds the memory."""

NOT_SERVED = {
    "--split-sentences": "documents are not split into sentences (GPT training does not use them)",
    "--keep-newlines": "it belongs to --split-sentences, which is not served",
    "--lang": "it belongs to --split-sentences, which is not served",
    "--find-optimal-num-workers": "give --workers the number of CPU cores",
    "--workers-to-check": "it belongs to --find-optimal-num-workers, which is not served",
    "--max-documents": "it belongs to --find-optimal-num-workers, which is not served",
    "--performance-dir": "it belongs to --find-optimal-num-workers, which is not served",
}
"""Megatron-LM's flags that are refused, with the reason."""


class InputError(Exception):
    """A fault of the input that the user can correct; the message says what and where."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Consecutive lines of one file."""

    path: str
    first_line: int
    """Number of the first line, counted from 1."""
    lines: list[bytes]


@dataclass(frozen=True, kw_only=True)
class EncodedBatch:
    """The documents of a batch."""

    num_bytes: int
    """Bytes of the lines."""
    documents: dict[str, list[tuple[numpy.ndarray, list[int]]]]
    """For each key, the tokens [n] of each document and the lengths of its sequences."""


class Encoder:
    """An encoder of lines to tokens; each worker process has one."""

    current: Encoder
    """The encoder of this process, since functions of a process pool have no other state."""

    def __init__(self, tokenizer: MegatronTokenizerBase, keys: Sequence[str], *, append_eod: bool) -> None:
        self.tokenizer = tokenizer
        self.keys = keys
        self.append_eod = append_eod
        self.dtype = DType.optimal_dtype(tokenizer.vocab_size)

    def encode(self, batch: Batch) -> EncodedBatch:
        """Encode the documents of the lines; blank lines have none.

        Raises:
            InputError: a line is no JSON object, lacks a key, or a value is no text. The message names file and line.
        """
        documents: dict[str, list[tuple[numpy.ndarray, list[int]]]] = {key: [] for key in self.keys}
        for number, line in enumerate(batch.lines, start=batch.first_line):
            if line.isspace():
                continue
            content = _parse(line, f"{batch.path}:{number}")
            for key in self.keys:
                documents[key].append(self._document(content, key, f"{batch.path}:{number}"))
        return EncodedBatch(num_bytes=sum(map(len, batch.lines)), documents=documents)

    def _document(self, content: dict[str, Any], key: str, place: str) -> tuple[numpy.ndarray, list[int]]:
        if key not in content:
            raise InputError(f"{place}: each line must have the key {key!r} (see --json-keys), got {sorted(content)}")
        texts = content[key] if isinstance(content[key], list) else [content[key]]
        if not all(isinstance(text, str) for text in texts):
            raise InputError(f"{place}: {key!r} must hold text or a list of texts, got {str(content[key])[:80]}")
        try:
            sequences = [tokens for tokens in map(self.tokenizer.tokenize, texts) if tokens]
        except ValueError as error:
            raise InputError(f"{place}: {error}") from error
        if sequences and self.append_eod:
            sequences[-1].append(self.tokenizer.eod)
        tokens = numpy.array([token for sequence in sequences for token in sequence], dtype=self.dtype)
        return tokens, [len(sequence) for sequence in sequences]


def _parse(line: bytes, place: str) -> dict[str, Any]:
    try:
        content = parse_json(line)
    except ValueError as error:
        raise InputError(f"{place}: each line must be JSON, got {error} in {line[:80]!r}") from None
    if not isinstance(content, dict):
        raise InputError(f"{place}: each line must be a JSON object, got {line[:80]!r}")
    return content


def _start_worker(arguments: argparse.Namespace) -> None:
    end_with_parent()
    Encoder.current = _make_encoder(arguments)


def _make_encoder(arguments: argparse.Namespace) -> Encoder:
    tokenizer = build_tokenizer(tokenizer_config(arguments))
    return Encoder(tokenizer, arguments.json_keys, append_eod=arguments.append_eod)


def _encode(batch: Batch) -> EncodedBatch:
    return Encoder.current.encode(batch)


def read_batches(paths: Sequence[str]) -> Iterator[Batch]:
    """Cut files into batches of whole lines."""
    for path in paths:
        with open(path, "rb") as stream:
            first_line = 1
            while lines := stream.readlines(BATCH_NBYTES):
                yield Batch(path=path, first_line=first_line, lines=lines)
                first_line += len(lines)


def encoded_batches(arguments: argparse.Namespace, batches: Iterable[Batch]) -> Generator[EncodedBatch, None, None]:
    """Encode batches in order, in ``--workers`` processes (with 1 in this process).

    Raises:
        InputError: a line is invalid, or a worker process died.
    """
    if arguments.workers == 1:
        yield from map(_make_encoder(arguments).encode, batches)
        return
    # Spawned, not forked: a fork would copy locks that threads of tokenizer libraries hold.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(arguments.workers, context, initializer=_start_worker, initargs=(arguments,))
    pending: deque[Future[EncodedBatch]] = deque()
    try:
        for batch in batches:
            pending.append(pool.submit(_encode, batch))
            if len(pending) >= BATCHES_PER_WORKER * arguments.workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise InputError("a worker process died (out of memory?); give fewer --workers") from error
    finally:
        pool.shutdown(cancel_futures=True)


class Progress:
    """The display of progress: a bar on a terminal, otherwise a line every ``log_interval`` documents."""

    def __init__(self, total_nbytes: int, log_interval: int) -> None:
        self.total_nbytes, self.log_interval = total_nbytes, log_interval
        self.num_documents = self.num_bytes = self.num_tokens = self._next_line = 0
        self.started = time.monotonic()
        self._bar, self._task = _make_bar(total_nbytes)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def add(self, batch: EncodedBatch) -> None:
        """Count a batch that has been written."""
        self.num_bytes += batch.num_bytes
        self.num_documents += max(len(documents) for documents in batch.documents.values())
        self.num_tokens += sum(tokens.size for documents in batch.documents.values() for tokens, _ in documents)
        if self._bar is not None:
            self._bar.update(self._task, completed=self.num_bytes, documents=self.num_documents)
        elif self.num_documents >= self._next_line + self.log_interval:
            self._next_line = self.num_documents
            print(self.summary(), file=sys.stderr, flush=True)

    def summary(self) -> str:
        """Format what has been done and how fast."""
        seconds = max(time.monotonic() - self.started, 1e-9)
        return (
            f"processed {self.num_documents} documents, {self.num_tokens} tokens "
            f"({self.num_documents / seconds:.0f} documents/s, {self.num_bytes / seconds / 1e6:.2f} MB/s)"
        )


def _make_bar(total_nbytes: int) -> tuple[Any, Any]:
    if not sys.stderr.isatty():
        return None, None
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
    except ImportError:
        return None, None
    columns = (BarColumn(), DownloadColumn(), TextColumn("{task.fields[documents]} documents"), TimeRemainingColumn())
    bar = Bar(*columns, console=Console(stderr=True))
    return bar, bar.add_task("documents", total=total_nbytes, documents=0)


class Output:
    """The corpora of all keys, under temporary names until ``commit``."""

    def __init__(self, prefix: str, keys: Sequence[str], dtype: type[numpy.number], *, overwrite: bool) -> None:
        self.prefixes = {key: f"{prefix}_{key}_document" for key in keys}
        for corpus in self.prefixes.values():
            for path in (get_bin_path(corpus), get_idx_path(corpus)):
                if os.path.exists(path) and not overwrite:
                    raise InputError(f"{path} exists already and must not be lost; give --overwrite to replace it")
        os.makedirs(os.path.dirname(prefix) or ".", exist_ok=True)
        for corpus in self.prefixes.values():
            _remove_leftovers(corpus)
        self.partial = {key: f"{corpus}.partial-{os.getpid()}" for key, corpus in self.prefixes.items()}
        self.builders = {key: IndexedDatasetBuilder(get_bin_path(path), dtype) for key, path in self.partial.items()}
        for builder in self.builders.values():
            # A file system without locks: other processes cannot lock the file either, so none removes it.
            with contextlib.suppress(OSError):
                fcntl.flock(builder.data_file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def add(self, batch: EncodedBatch) -> None:
        """Append the documents of a batch."""
        for key, documents in batch.documents.items():
            for tokens, lengths in documents:
                self.builders[key].add_document(tokens, lengths)

    def commit(self) -> None:
        """Rename the files to their final names, the index last, since readers refuse a corpus without one."""
        for key, builder in self.builders.items():
            builder.finalize(get_idx_path(self.partial[key]))
        for key, corpus in self.prefixes.items():
            with contextlib.suppress(FileNotFoundError):
                os.remove(get_idx_path(corpus))
            os.replace(get_bin_path(self.partial[key]), get_bin_path(corpus))
            os.replace(get_idx_path(self.partial[key]), get_idx_path(corpus))

    def discard(self) -> None:
        """Remove the files with temporary names."""
        for key, builder in self.builders.items():
            builder.data_file.close()
            for path in (get_bin_path(self.partial[key]), get_idx_path(self.partial[key])):
                with contextlib.suppress(FileNotFoundError):
                    os.remove(path)


def _remove_leftovers(corpus: str) -> None:
    """Remove the partial files of killed runs. An active run locks its ``.bin``, which also protects its ``.idx``."""
    for path in sorted(glob.glob(f"{glob.escape(corpus)}.partial-*")):  # a .bin comes before its .idx
        prefix, suffix = os.path.splitext(path)
        if suffix == ".idx" and os.path.exists(get_bin_path(prefix)):
            continue
        with contextlib.suppress(OSError), open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.remove(path)
            print(f"removed {path}, a partial file of a killed run", file=sys.stderr)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; end the program with the reason if a flag of Megatron-LM's tool is not served."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", required=True, help="file of JSON lines, or a pattern: its matches in sorted order")
    parser.add_argument("--json-keys", nargs="+", default=["text"], help="keys of each line, each a corpus")
    parser.add_argument("--output-prefix", required=True, help="path of the corpora without _<key>_document.bin/.idx")
    TOKENIZER_FLAGS.add_to(parser)
    parser.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    parser.add_argument("--workers", type=int, default=1, help="processes that tokenize")
    parser.add_argument("--log-interval", type=int, default=1000, help="documents between lines of progress")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    parser.add_argument(
        "--partitions", type=int, default=1, help="accepted and without effect: one pass uses all --workers"
    )
    parser.add_argument("--keep-sequential-samples", action="store_true", help="always so")
    for flag, reason in NOT_SERVED.items():
        parser.add_argument(flag, nargs="*", action=_Refuse, help=argparse.SUPPRESS, const=reason)
    parsed = parser.parse_args(arguments)
    for name in ("workers", "log_interval"):
        if getattr(parsed, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be positive, got {getattr(parsed, name)}")
    if parsed.partitions < 1:
        parser.error(f"--partitions must be at least 1, got {parsed.partitions}")
    if parsed.partitions > 1:
        print("--partitions changes nothing here: one pass uses all --workers and writes one file", file=sys.stderr)
    if len(set(parsed.json_keys)) < len(parsed.json_keys):
        parser.error(f"--json-keys must differ from each other, got {' '.join(parsed.json_keys)}")
    return parsed


class _Refuse(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parser.error(f"{self.option_strings[0]} is not served: {self.const}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare the corpora; return the exit status; print errors that the user can correct in one line."""
    parsed = parse_arguments(arguments)
    try:
        _prepare(parsed)
    except (InputError, ValueError, OSError, ImportError) as error:
        print(f"preprocess_data: {error}", file=sys.stderr)
        return 1
    return 0


def _prepare(arguments: argparse.Namespace) -> None:
    paths = [arguments.input] if os.path.isfile(arguments.input) else sorted(glob.glob(arguments.input))
    if not paths:
        raise InputError(f"--input must name a file or a pattern that matches some, got {arguments.input}")
    encoder = _make_encoder(arguments)  # a wrong tokenizer fails here, once, not in each worker
    output = Output(arguments.output_prefix, arguments.json_keys, encoder.dtype, overwrite=arguments.overwrite)
    try:
        with (
            contextlib.closing(encoded_batches(arguments, read_batches(paths))) as batches,
            Progress(sum(map(os.path.getsize, paths)), arguments.log_interval) as progress,
        ):
            for batch in batches:
                output.add(batch)
                progress.add(batch)
        if not progress.num_documents:
            raise InputError(f"{', '.join(paths)} must hold documents, got only empty lines")
        output.commit()
    finally:
        output.discard()
    print(f"{progress.summary()}; wrote {', '.join(get_bin_path(prefix) for prefix in output.prefixes.values())}")


if __name__ == "__main__":
    sys.exit(main())
