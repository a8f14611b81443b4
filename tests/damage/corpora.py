"""Mutated corpora: each is refused with the name of a file, or gives the samples that it gave before.

``python -m tests.damage.corpora --trials 2000`` changes an ``.idx``, a ``.bin`` or both, opens the corpus, builds its samples
and reads them all. The format has no checksum of the tokens. So where a ``.bin`` of the same length has other ids that the
tokenizer knows, the samples must have exactly these other ids, in the same places.
"""

from __future__ import annotations

import random
import shutil
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from tests.damage.mutations import change_file, run_often
from tests.support.corpora import build, config, write_corpus

_LENGTHS = 34  # where they begin in an index
_NUM_SEQUENCES = 24


def mutate_often(trials: int, *, seed: int = 0) -> tuple[Counter[str], list[str]]:
    """Change corpora and read them; return how often what came of it, and a line for each fault."""
    draw, outcomes, faults = random.Random(seed), Counter[str](), []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        bases = _corpora(root)
        expected = {base: _samples(base, mmap=True) for base in bases}
        for trial in range(trials):
            base, other = draw.sample(bases, 2)
            folder = root / f"trial{trial}"
            folder.mkdir()
            for ending in (".bin", ".idx"):
                shutil.copy(f"{base}{ending}", folder / f"corpus{ending}")
            done = _change(folder / "corpus", other, draw)
            outcome = _outcome(folder / "corpus", Path(base), expected[base], mmap=draw.random() < 0.5)
            if done == "exchanged .idx, exchanged .bin" and outcome.startswith("FAULT: other samples"):
                outcome = "another corpus as a whole"
            outcomes[outcome.split(":")[0]] += 1
            if outcome.startswith("FAULT"):
                faults.append(f"trial {trial}, {Path(base).name}, {done}: {outcome}")
            shutil.rmtree(folder)
    return outcomes, faults


def _corpora(root: Path) -> list[str]:
    draw = numpy.random.default_rng(0)
    bases = []
    for name, dtype in (("u16", numpy.uint16), ("i32", numpy.int32), ("i64", numpy.int64), ("u8", numpy.uint8)):
        high = 256 if dtype is numpy.uint8 else 512
        documents = [draw.integers(1, high, size=draw.integers(1, 30)) for _ in range(_NUM_SEQUENCES)]
        bases.append(write_corpus(root / name, [document.tolist() for document in documents], dtype))
    builder = IndexedDatasetBuilder(f"{root}/sequences.bin", numpy.uint16)
    for length in draw.integers(0, 20, size=_NUM_SEQUENCES // 2):
        builder.add_document(draw.integers(1, 512, size=2 * length), [length, length])
    builder.finalize(f"{root}/sequences.idx")
    return [*bases, f"{root}/sequences"]


def _change(corpus: Path, other: str, draw: random.Random) -> str:
    targets = draw.choice(((".idx",), (".idx",), (".idx",), (".bin",), (".idx", ".bin")))
    done = []
    for ending in targets:
        path = corpus.with_suffix(ending)
        if ending == ".idx" and draw.random() < 0.5:
            field = draw.choice(list(_FIELDS))
            path.write_bytes(_FIELDS[field](path.read_bytes(), draw))
            done.append(f"{field} of {ending}")
        else:
            done.append(f"{change_file(path, Path(other + ending), draw)} {ending}")
    return ", ".join(done)


def _put(content: bytes, start: int, format_: str, value: int) -> bytes:
    packed = struct.pack(format_, value)
    return content[:start] + packed + content[start + len(packed) :]


def _some(draw: random.Random, near: int, bits: int) -> int:
    edges = (
        0,
        1,
        -1,
        2 ** (bits - 1) - 1,
        -(2 ** (bits - 1)),
        near + 1,
        near - 1,
        2 * near,
        near ^ (1 << draw.randrange(bits - 1)),
    )
    return max(-(2 ** (bits - 1)), min(2 ** (bits - 1) - 1, draw.choice(edges)))


def _count(content: bytes) -> int:
    return int(struct.unpack_from("<Q", content, 18)[0])


def _length(content: bytes, draw: random.Random) -> bytes:
    start = _LENGTHS + 4 * draw.randrange(_count(content))
    return _put(content, start, "<i", _some(draw, struct.unpack_from("<i", content, start)[0], 32))


def _two_lengths(content: bytes, draw: random.Random) -> bytes:
    """Move tokens from one sequence to another, so that the sum stays."""
    first, second = (_LENGTHS + 4 * index for index in draw.sample(range(_count(content)), 2))
    amount = draw.randint(1, 5)
    content = _put(content, first, "<i", struct.unpack_from("<i", content, first)[0] + amount)
    return _put(content, second, "<i", struct.unpack_from("<i", content, second)[0] - amount)


def _pointer(content: bytes, draw: random.Random) -> bytes:
    start = _LENGTHS + 4 * _count(content) + 8 * draw.randrange(_count(content))
    return _put(content, start, "<q", _some(draw, struct.unpack_from("<q", content, start)[0], 64))


def _bound(content: bytes, draw: random.Random) -> bytes:
    num_bounds = struct.unpack_from("<Q", content, 26)[0]
    start = _LENGTHS + 12 * _count(content) + 8 * draw.randrange(num_bounds)
    return _put(content, start, "<q", _some(draw, struct.unpack_from("<q", content, start)[0], 64))


def _counts(content: bytes, draw: random.Random) -> bytes:
    start = draw.choice((18, 26))
    return _put(content, start, "<q", _some(draw, struct.unpack_from("<q", content, start)[0], 64))


_FIELDS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "version": lambda content, draw: _put(content, 9, "<q", _some(draw, 1, 64)),
    "dtype": lambda content, draw: _put(content, 17, "<B", draw.choice((*range(12), 255))),
    "counts": _counts,
    "a length": _length,
    "two lengths": _two_lengths,
    "a pointer": _pointer,
    "a bound": _bound,
}


def _samples(prefix: str, *, mmap: bool) -> list[list[int]]:
    settings = config(blend=([prefix], None), split="1,0,0", sequence_length=8, mmap_bin_files=mmap)
    train = build([40, 0, 0], settings)[0]
    return [[*train[i]["tokens"].tolist(), int(train[i]["labels"][-1])] for i in range(len(train))]


def _outcome(corpus: Path, base: Path, expected: Any, *, mmap: bool) -> str:
    try:
        found = _samples(str(corpus), mmap=mmap)
    except (ValueError, FileNotFoundError) as error:
        return "refused" if str(corpus) in str(error) else f"FAULT: an error that names no file: {error}"
    except Exception as error:
        return f"FAULT: {type(error).__name__}: {error}"
    if found == expected:
        return "the same samples"
    tokens, before = corpus.with_suffix(".bin").read_bytes(), base.with_suffix(".bin").read_bytes()
    if tokens == before or len(tokens) != len(before):
        return "FAULT: other samples of the same tokens"
    # The same samples must come from the index that nobody changed and these tokens.
    shutil.copy(base.with_suffix(".idx"), corpus.with_suffix(".idx"))
    shutil.rmtree(corpus, ignore_errors=True)
    try:
        if _samples(str(corpus), mmap=mmap) != found:
            return "FAULT: other samples than these tokens have"
    except ValueError as error:
        return f"FAULT: samples of tokens that the whole index refuses: {error}"
    return "other tokens, which the format cannot tell"


if __name__ == "__main__":
    sys.exit(run_often(__doc__, 2000, mutate_often))
