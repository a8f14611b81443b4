"""The ``MMIDIDX`` index file, written and read byte for byte as Megatron does.

Layout, little endian: magic [9 bytes], version [u64], dtype code [u8], number of sequences S [u64], number of document
bounds B [u64], then sequence lengths [S, i32] in tokens, sequence pointers [S, i64] in bytes into the ``.bin`` file,
document bounds [B, i64] in sequences (the first is 0, the last is S), and for multimodal corpora modes [S, i8].

Source: Megatron-Core's indexed dataset format, version 1.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")


class DType(Enum):
    """Codes of token types in an index file."""

    uint8 = 1
    int8 = 2
    int16 = 3
    int32 = 4
    int64 = 5
    float64 = 6
    float32 = 7
    uint16 = 8

    @classmethod
    def code_from_dtype(cls, value: type[numpy.number]) -> int:
        """Return the code of a numpy type.

        Raises:
            ValueError: the format has no code for it.
        """
        name = numpy.dtype(value).name
        if name not in cls.__members__:
            raise ValueError(f"the token dtype must be one of {', '.join(cls.__members__)}, got {name}")
        return cls[name].value

    @classmethod
    def dtype_from_code(cls, value: int) -> type[numpy.number]:
        """Return the numpy type of a code; raises ValueError for a code that the format does not have."""
        dtype: type[numpy.number] = getattr(numpy, cls(value).name)
        return dtype

    @staticmethod
    def size(key: int | type[numpy.number]) -> int:
        """Return the bytes of one token, of a code or numpy type."""
        return numpy.dtype(DType.dtype_from_code(key) if isinstance(key, int) else key).itemsize

    @staticmethod
    def optimal_dtype(cardinality: int | None) -> type[numpy.number]:
        """Choose the token type for a vocabulary: uint16 below 65,500 ids (Megatron's bound), else int32."""
        return numpy.uint16 if cardinality is not None and cardinality < 65500 else numpy.int32


def get_idx_path(path_prefix: str) -> str:
    """Return the path of the index file of a corpus."""
    return path_prefix + ".idx"


def get_bin_path(path_prefix: str) -> str:
    """Return the path of the token file of a corpus."""
    return path_prefix + ".bin"


@dataclass(frozen=True, kw_only=True)
class SequenceIndex:
    """Positions of the sequences and documents of a corpus in its ``.bin`` file."""

    dtype: type[numpy.number]
    """Type of a token."""
    lengths: numpy.ndarray
    """Tokens of each sequence, [S] int32."""
    pointers: numpy.ndarray
    """Offset of each sequence in bytes, [S] int64."""
    document_bounds: numpy.ndarray
    """Index of the first sequence of each document and, last, S, [B] int64."""
    modes: numpy.ndarray | None
    """Mode of each sequence of a multimodal corpus, [S] int8; otherwise None."""


def write_index(
    path: str,
    dtype: type[numpy.number],
    lengths: Sequence[int],
    document_bounds: Sequence[int],
    modes: Sequence[int] | None = None,
) -> None:
    """Write an index file atomically, under a temporary name that is renamed to ``path``.

    Args:
        lengths: [S] tokens of each sequence, in the order of the ``.bin`` file.
        document_bounds: [B] index of the first sequence of each document and, last, S.
        modes: [S] modes of a multimodal corpus.
    """
    length_array = numpy.asarray(lengths, dtype=numpy.int32)
    pointers = numpy.zeros(length_array.size, dtype=numpy.int64)
    numpy.cumsum(length_array[:-1].astype(numpy.int64) * DType.size(dtype), out=pointers[1:])
    header = _HEADER.pack(MAGIC, VERSION, DType.code_from_dtype(dtype), length_array.size, len(document_bounds))
    partial = f"{path}.partial-{os.getpid()}"
    try:
        with open(partial, "wb") as stream:
            stream.write(header)
            stream.write(length_array.astype("<i4").tobytes())
            stream.write(pointers.astype("<i8").tobytes())
            stream.write(numpy.asarray(document_bounds, dtype="<i8").tobytes())
            if modes is not None:
                stream.write(numpy.asarray(modes, dtype=numpy.int8).tobytes())
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
    finally:
        if os.path.exists(partial):
            os.remove(partial)


def read_index(path: str, *, multimodal: bool = False) -> SequenceIndex:
    """Map an index file into memory and check it.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: it is no index of version 1, its dtype is unknown, or its size or fields contradict its header. The
            message names the file and the field.
    """
    num_bytes = _size_of(path)
    with open(path, "rb") as stream:
        header = stream.read(_HEADER.size)
    if not header.startswith(MAGIC[: len(header)]) or not header:
        raise ValueError(f"{path} is not a Megatron index: it must start with {MAGIC!r}, got {header[:9]!r}")
    if len(header) < _HEADER.size:
        raise ValueError(f"{path} is truncated: an index has a header of {_HEADER.size} bytes, got {num_bytes} bytes")
    _, version, code, num_sequences, num_bounds = _HEADER.unpack(header)
    if version != VERSION:
        raise ValueError(f"{path}: the version of an index must be {VERSION}, got {version}")
    if code not in [dtype.value for dtype in DType]:
        known = ", ".join(f"{dtype.value} ({dtype.name})" for dtype in DType)
        raise ValueError(f"{path}: the dtype code must be one of {known}, got {code}")
    _check_size(path, num_bytes, num_sequences, num_bounds, multimodal)
    fields = numpy.memmap(path, dtype=numpy.uint8, mode="r")

    def field(dtype: str, count: int, start: int) -> numpy.ndarray:
        return numpy.frombuffer(fields, dtype=dtype, count=count, offset=start)

    start = _HEADER.size
    index = SequenceIndex(
        dtype=DType.dtype_from_code(code),
        lengths=field("<i4", num_sequences, start),
        pointers=field("<i8", num_sequences, start + 4 * num_sequences),
        document_bounds=field("<i8", num_bounds, start + 12 * num_sequences),
        modes=field("i1", num_sequences, start + 12 * num_sequences + 8 * num_bounds) if multimodal else None,
    )
    _check_fields(path, index)
    return index


def check_tokens(index: SequenceIndex, idx_path: str, bin_path: str, *, allow_gaps: bool = False) -> None:
    """Check that index and token file belong together: the sequences fill the file, one after the other.

    Args:
        allow_gaps: sequences may also be a selection, in any order and overlapping, as long as each lies in the file.

    Raises:
        FileNotFoundError: the token file does not exist.
        ValueError: its size, the lengths, the pointers and the dtype contradict each other, or tokens are no integers.
    """
    num_bytes, itemsize = _size_of(bin_path), DType.size(index.dtype)
    if not issubclass(index.dtype, numpy.integer):
        raise ValueError(f"{idx_path}: token ids must be integers, got {numpy.dtype(index.dtype).name}")
    if allow_gaps:
        _check_selection(index, idx_path, bin_path, num_bytes)
        return
    ends = numpy.cumsum(index.lengths, dtype=numpy.int64) * itemsize
    needed = int(ends[-1]) if ends.size else 0
    # The pointers say whether it is the lengths that are wrong.
    wrong = numpy.flatnonzero(index.pointers[1:] != ends[:-1]) + 1
    if index.pointers.size and index.pointers[0] != 0:
        wrong = numpy.array([0])
    if wrong.size:
        number = int(wrong[0])
        expected = int(ends[number - 1]) if number else 0
        raise ValueError(
            f"{idx_path}: sequences must follow each other in {bin_path}, so that sequence {number} must begin at byte "
            f"{expected} after {number} sequences of {itemsize}-byte tokens, got {index.pointers[number]}; prepare the corpus "
            "again, or, if the index is a selection of sequences, allow it (allow_gaps, --allow-gaps-in-corpora)"
        )
    if num_bytes != needed:
        fault = "is truncated" if num_bytes < needed else "has bytes that no sequence holds"
        raise ValueError(
            f"{bin_path} {fault}: {idx_path} says that it holds {needed} bytes, got {num_bytes}; "
            "copy or prepare the corpus again"
        )


def _check_selection(index: SequenceIndex, idx_path: str, bin_path: str, num_bytes: int) -> None:
    itemsize = DType.size(index.dtype)
    # Subtracting from the file's size cannot overflow, as adding to a pointer could.
    outside = index.pointers > num_bytes - index.lengths.astype(numpy.int64) * itemsize
    wrong = numpy.flatnonzero(outside | (index.pointers % itemsize != 0))
    if wrong.size:
        number = int(wrong[0])
        raise ValueError(
            f"{idx_path}: each sequence must lie in the {num_bytes} bytes of {bin_path}, which is truncated otherwise, at a "
            f"multiple of {itemsize} bytes, got sequence {number} with {index.lengths[number]} tokens at byte "
            f"{index.pointers[number]}; copy or prepare the corpus again"
        )


def _size_of(path: str) -> int:
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path} must exist: a corpus is a pair of files, <prefix>.bin and <prefix>.idx")
    return os.path.getsize(path)


def _check_size(path: str, num_bytes: int, num_sequences: int, num_bounds: int, multimodal: bool) -> None:
    without_modes = _HEADER.size + 12 * num_sequences + 8 * num_bounds
    with_modes = without_modes + num_sequences
    if num_bytes == with_modes or (num_bytes == without_modes and not multimodal):
        return
    expected = f"{with_modes if multimodal else without_modes} bytes"
    counts = f"{num_sequences} sequences and {num_bounds} document bounds"
    if multimodal and num_bytes == without_modes:
        raise ValueError(f"{path} has no modes: a multimodal index of {counts} has {expected}, got {num_bytes}")
    fault = "is truncated" if num_bytes < without_modes else "has bytes that do not belong to an index"
    raise ValueError(f"{path} {fault}: its header says {counts}, which is {expected}, got {num_bytes}")


def _check_fields(path: str, index: SequenceIndex) -> None:
    bounds, num_sequences = index.document_bounds, index.lengths.size
    if bounds.size == 0 or bounds[0] != 0 or bounds[-1] != num_sequences or numpy.any(bounds[1:] < bounds[:-1]):
        ends = f"{bounds[0]} to {bounds[-1]}" if bounds.size else "none"
        raise ValueError(f"{path}: document bounds must rise from 0 to {num_sequences} sequences, got {ends}")
    if num_sequences and (index.lengths.min() < 0 or index.pointers.min() < 0):
        raise ValueError(
            f"{path}: sequence lengths and pointers must not be negative, "
            f"got {index.lengths.min()} tokens and byte {index.pointers.min()}"
        )
