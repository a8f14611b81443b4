"""The indexed format: corpora are read as written, and damaged files are refused by name."""

from __future__ import annotations

import pickle
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets.indexed_dataset import (
    DType,
    IndexedDataset,
    IndexedDatasetBuilder,
    get_bin_path,
    get_idx_path,
)
from tests.support.corpora import FIXTURES, write_corpus

TOKEN_TYPES = [numpy.uint8, numpy.int8, numpy.int16, numpy.uint16, numpy.int32, numpy.int64]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(TOKEN_TYPES), mmap=st.booleans(), multimodal=st.booleans())
def test_what_is_written_comes_back(
    data: st.DataObject, dtype: type, mmap: bool, multimodal: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Documents of several sequences, empty sequences and empty documents, through both ways of adding."""
    limits = numpy.iinfo(dtype)
    tokens = st.lists(st.integers(int(limits.min), int(limits.max)), max_size=8)
    documents = data.draw(st.lists(st.lists(tokens, max_size=4), max_size=6))
    prefix = str(tmp_path_factory.mktemp("corpus") / "corpus")
    builder = IndexedDatasetBuilder(get_bin_path(prefix), dtype, multimodal)
    for number, document in enumerate(documents):
        if number % 2:
            flat = [token for sequence in document for token in sequence]
            builder.add_document(flat, [len(sequence) for sequence in document], [number] * len(document))
        else:
            for sequence in document:
                builder.add_item(torch.tensor(sequence, dtype=torch.int64), number)
            builder.end_document()
    builder.finalize(get_idx_path(prefix))
    corpus = IndexedDataset(prefix, multimodal=multimodal, mmap=mmap)
    expected = [sequence for document in documents for sequence in document]
    items = [corpus[number][0] if multimodal else corpus[number] for number in range(len(corpus))]
    assert [item.tolist() for item in items] == expected
    assert all(item.dtype == dtype for item in items)
    ends = numpy.cumsum([0, *map(len, documents)])
    assert corpus.document_indices.tolist() == ends.tolist()
    if multimodal:
        modes = [number for number, document in enumerate(documents) for _ in document]
        assert corpus.sequence_modes is not None and corpus.sequence_modes.tolist() == modes


def test_pieces_and_slices(tmp_path: Path) -> None:
    corpus = IndexedDataset(write_corpus(tmp_path / "a", [[1, 2, 3, 4], [5], [6, 7]]))
    assert corpus.get(0, offset=1, length=2).tolist() == [2, 3]
    assert corpus.get(0, offset=2).tolist() == [3, 4]
    assert corpus.get(-1).tolist() == [6, 7]
    assert [item.tolist() for item in corpus[1:]] == [[5], [6, 7]]
    assert corpus[2:1] == []
    with pytest.raises(IndexError, match="holds 3 sequences, got index 3"):
        corpus[3]
    with pytest.raises(ValueError, match="must lie in its 4 tokens, got 4 from token 1"):
        corpus.get(0, offset=1, length=4)
    with pytest.raises(ValueError, match="step 1, got 2"):
        corpus[::2]
    with pytest.raises(TypeError, match="got str"):
        corpus["a"]  # type: ignore[index]


@pytest.mark.parametrize("mmap", [True, False])
def test_pickled_corpora_open_their_files_again(mmap: bool, tmp_path: Path) -> None:
    """Data-loader workers that are spawned get the corpus this way."""
    corpus = IndexedDataset(write_corpus(tmp_path / "a", [[1, 2]]), mmap=mmap)
    assert pickle.loads(pickle.dumps(corpus))[0].tolist() == [1, 2]


def test_merged_corpora_follow_each_other(tmp_path: Path) -> None:
    first = write_corpus(tmp_path / "a", [[1, 2], [3]])
    second = write_corpus(tmp_path / "b", [[4, 5, 6]])
    builder = IndexedDatasetBuilder(str(tmp_path / "c.bin"), numpy.uint16)
    builder.add_index(first)
    builder.add_document([9], [1])
    builder.add_index(second)
    builder.finalize(str(tmp_path / "c.idx"))
    together = write_corpus(tmp_path / "d", [[1, 2], [3], [9], [4, 5, 6]])
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"c{ending}").read_bytes() == Path(together + ending).read_bytes()
    other = write_corpus(tmp_path / "e", [[1]], numpy.int32)
    builder = IndexedDatasetBuilder(str(tmp_path / "f.bin"), numpy.uint16)
    with pytest.raises(ValueError, match=r"e\.idx: .* must hold uint16 tokens, got int32"), builder.data_file:
        builder.add_index(other)


def test_exists_needs_both_files(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "a", [[1]])
    assert IndexedDataset.exists(prefix)
    Path(prefix + ".bin").unlink()
    assert not IndexedDataset.exists(prefix)


def test_tokens_that_do_not_fit_are_not_wrapped(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(str(tmp_path / "a.bin"), numpy.uint16)
    with pytest.raises(ValueError, match=r"must be uint16 values, got 1 to 65536 of int64; choose a wider dtype"):
        builder.add_item([1, 65536])
    with pytest.raises(ValueError, match="lengths must sum to its tokens"):
        builder.add_document([1, 2], [3])
    builder.add_item([1])
    with pytest.raises(ValueError, match=r"call end_document\(\)"):
        builder.finalize(str(tmp_path / "a.idx"))
    with pytest.raises(ValueError, match=r"must be one of uint8, .* got complex128"):
        IndexedDatasetBuilder(str(tmp_path / "a.bin"), numpy.complex128)


def test_smallest_token_type_has_megatrons_bound() -> None:
    assert [DType.optimal_dtype(size) for size in (65499, 65500, None)] == [numpy.uint16, numpy.int32, numpy.int32]
    assert [DType.size(dtype) for dtype in (numpy.uint16, DType.int64.value)] == [2, 8]


def _patched(start: int, value: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content[:start] + value + content[start + len(value) :]


LAST_BOUND = slice(-8, None)
DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "foreign": (".idx", lambda content: b"PK\x03\x04" + content, r"is not a Megatron index: it must start with"),
    "empty": (".idx", lambda content: b"", "is not a Megatron index"),
    "cut in the header": (".idx", lambda content: content[:20], "truncated: .* header of 34 bytes, got 20 bytes"),
    "version": (".idx", _patched(9, struct.pack("<Q", 2)), "version of an index must be 1, got 2"),
    "dtype": (".idx", _patched(17, b"\x09"), r"dtype code must be one of 1 \(uint8\).*, got 9"),
    "cut by a byte": (".idx", lambda content: content[:-1], "is truncated: its header says 40 sequences"),
    "longer": (".idx", lambda content: content + b"??", "bytes that do not belong to an index"),
    "more sequences": (".idx", _patched(18, struct.pack("<Q", 2**40)), "is truncated: its header says 1099511627776"),
    "bounds": (".idx", lambda content: content[:-8] + struct.pack("<q", 7), "must rise from 0 to 40 .*, got 0 to 7"),
    "negative length": (".idx", _patched(34, struct.pack("<i", -3)), "must not be negative, got -3 tokens"),
    "a pointer back": (
        ".idx",
        _patched(34 + 4 * 40 + 8 * 5, struct.pack("<q", 0)),
        "sequence 5 must begin at byte .*, got 0",
    ),
    "a pointer on": (".idx", _patched(34 + 4 * 40 + 8, struct.pack("<q", 2**62)), "sequence 1 must begin .*, got 4611"),
    "the last length": (
        ".idx",
        _patched(34 + 4 * 39, struct.pack("<i", 2**30)),
        r"says that it holds \d+ bytes, got 2388",
    ),
    "a length within": (".idx", _patched(34, struct.pack("<i", 2**31 - 1)), "sequence 1 must begin at byte 4294967294"),
    "more tokens": (
        ".bin",
        lambda content: content + b"??",
        "has bytes that no sequence holds: .* 2388 bytes, got 2390",
    ),
    "float tokens": (".idx", _patched(17, b"\x07"), "token ids must be integers, got float32"),
    "wider tokens": (".idx", _patched(17, b"\x04"), "sequence 1 must begin at byte"),
    "cut tokens": (".bin", lambda content: content[:-1], "is truncated: .* holds 2388 bytes, got 2387"),
    "no tokens": (".bin", lambda content: b"", "is truncated: .* got 0"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_refused_by_name(damage: str, tmp_path: Path) -> None:
    ending, change, message = DAMAGES[damage]
    for copied in (".bin", ".idx"):
        shutil.copy(FIXTURES / f"small_u16{copied}", tmp_path / f"corpus{copied}")
    path = tmp_path / f"corpus{ending}"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=re.escape(str(path)) + ".*" + message):
        IndexedDataset(str(tmp_path / "corpus"))


def test_a_selection_of_sequences_is_served_if_asked_for(tmp_path: Path) -> None:
    """Some tools write an index over a part of another corpus. No sequence may lie outside of the tokens even then."""
    prefix = write_corpus(tmp_path / "a", [[1, 2], [3], [4, 5, 6]])
    index = Path(prefix + ".idx")
    content = bytearray(index.read_bytes())
    content[34 + 12 + 8 : 34 + 12 + 16] = struct.pack("<q", 6)  # the second sequence begins where the third does
    index.write_bytes(content)
    with pytest.raises(ValueError, match="allow_gaps"):
        IndexedDataset(prefix)
    assert [item.tolist() for item in IndexedDataset(prefix, allow_gaps=True)[:]] == [[1, 2], [4], [4, 5, 6]]
    for pointer in (2**63 - 1, 11, 5, -2):  # overflow, beyond the end, within a token, before the beginning
        content[34 + 12 + 8 : 34 + 12 + 16] = struct.pack("<q", pointer)
        index.write_bytes(content)
        with pytest.raises(ValueError, match=re.escape(str(index))):
            IndexedDataset(prefix, allow_gaps=True)


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_missing_files_are_named(ending: str, tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "a", [[1]])
    Path(prefix + ending).unlink()
    with pytest.raises(FileNotFoundError, match=re.escape(prefix + ending) + " must exist"):
        IndexedDataset(prefix)


def test_text_corpora_have_no_modes(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "a", [[1]])
    with pytest.raises(ValueError, match="has no modes"):
        IndexedDataset(prefix, multimodal=True)


def test_unfinished_index_is_never_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index appears by a rename: a crash while it is written leaves the old one or none, and no litter."""
    prefix = tmp_path / "a"

    def full_disk(*_: object) -> None:
        assert not Path(f"{prefix}.idx").exists()
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="no space left"):
        write_corpus(prefix, [[1]])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin"]


@pytest.mark.parametrize("dtype", [numpy.uint16, numpy.int32])
def test_a_builder_takes_any_list_of_integers(tmp_path: Path, dtype: type[numpy.number]) -> None:
    """Strings of digits, too: Megatron-Core's builder takes them."""
    builder = IndexedDatasetBuilder(str(tmp_path / "corpus.bin"), dtype=dtype)
    builder.add_document(["12", "7", "40000"], [2, 1])
    builder.add_document([1, numpy.int64(2), numpy.uint8(3)], [3])
    builder.add_document(torch.tensor([4, 5]), [2])
    builder.finalize(str(tmp_path / "corpus.idx"))
    corpus = IndexedDataset(str(tmp_path / "corpus"))
    assert [one.tolist() for one in corpus[:4]] == [[12, 7], [40000], [1, 2, 3], [4, 5]]
    other = IndexedDatasetBuilder(str(tmp_path / "other.bin"), dtype=dtype)
    with other.data_file, pytest.raises(ValueError, match="words"):
        other.add_document(["words"], [1])
