"""Reader of corpora in Megatron's indexed format."""

from __future__ import annotations

import os
from typing import Any

import numpy
import torch

from megatron.core.datasets.indexed_dataset_builder import IndexedDatasetBuilder
from megatron.core.datasets.indexed_format import (
    DType,
    check_tokens,
    get_bin_path,
    get_idx_path,
    read_index,
)

__all__ = ["DType", "IndexedDataset", "IndexedDatasetBuilder", "get_bin_path", "get_idx_path"]


class IndexedDataset(torch.utils.data.Dataset[Any]):
    """The sequences of a corpus, each a read-only array of tokens [n].

    Args:
        path_prefix: path of the ``.bin`` and ``.idx`` files without these endings.
        multimodal: whether each sequence has a mode; items are then pairs (tokens, mode).
        mmap: map the token file into memory; otherwise read it piece by piece (for file systems where mapping is slow).
        allow_gaps: the index may be a selection of the sequences of the token file, which need not follow each other.

    Raises:
        FileNotFoundError: one of the files is missing.
        ValueError: one of the files is truncated or has another format, or they do not belong together; the message names
            the file and the fault.
    """

    def __init__(
        self, path_prefix: str, multimodal: bool = False, mmap: bool = True, *, allow_gaps: bool = False
    ) -> None:
        super().__init__()
        self.path_prefix = path_prefix
        self.multimodal = multimodal
        self.mmap = mmap
        self.allow_gaps = allow_gaps
        self._open()

    def _open(self) -> None:
        idx_path, bin_path = get_idx_path(self.path_prefix), get_bin_path(self.path_prefix)
        self.index = read_index(idx_path, multimodal=self.multimodal)
        check_tokens(self.index, idx_path, bin_path, allow_gaps=self.allow_gaps)
        self._file = open(bin_path, "rb", buffering=0)  # noqa: SIM115 - lives as long as the dataset
        self._tokens: numpy.ndarray | None = None
        if self.mmap and os.path.getsize(bin_path) > 0:
            self._tokens = numpy.memmap(self._file, dtype=numpy.uint8, mode="r")

    def __getstate__(self) -> tuple[str, bool, bool, bool]:
        return self.path_prefix, self.multimodal, self.mmap, self.allow_gaps

    def __setstate__(self, state: tuple[str, bool, bool, bool]) -> None:
        self.path_prefix, self.multimodal, self.mmap, self.allow_gaps = state
        self._open()

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()

    def __len__(self) -> int:
        return self.index.lengths.size

    def __getitem__(self, idx: int | numpy.integer | slice) -> Any:
        """Return the tokens of one sequence, or a list for a slice with step 1.

        Raises:
            IndexError: there is no such sequence.
            ValueError: the slice has another step.
            TypeError: the index is neither an integer nor a slice.
        """
        if isinstance(idx, int | numpy.integer):
            return self.get(int(idx))
        if not isinstance(idx, slice):
            raise TypeError(f"an index into {self.path_prefix} must be an integer or a slice, got {type(idx).__name__}")
        start, stop, step = idx.indices(len(self))
        if step != 1:
            raise ValueError(f"a slice of {self.path_prefix} must have step 1, got {step}")
        sequences = [self._read(number, 0, int(self.index.lengths[number])) for number in range(start, stop)]
        return sequences if self.index.modes is None else (sequences, self.index.modes[idx])

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> Any:
        """Return ``length`` tokens of sequence ``idx`` from token ``offset`` on; None: up to its end.

        Raises:
            IndexError: there is no such sequence.
            ValueError: the range is not within the sequence.
        """
        number = idx + len(self) if idx < 0 else idx
        if not 0 <= number < len(self):
            raise IndexError(f"{self.path_prefix} holds {len(self)} sequences, got index {idx}")
        sequence_length = int(self.index.lengths[number])
        length = sequence_length - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > sequence_length:
            raise ValueError(
                f"a piece of sequence {number} of {self.path_prefix} must lie in its {sequence_length} tokens, "
                f"got {length} from token {offset}"
            )
        tokens = self._read(number, int(offset), int(length))
        return tokens if self.index.modes is None else (tokens, self.index.modes[number])

    def _read(self, number: int, offset: int, length: int) -> numpy.ndarray:
        dtype = numpy.dtype(self.index.dtype).newbyteorder("<")
        start = int(self.index.pointers[number]) + offset * dtype.itemsize
        if length == 0:
            return numpy.empty(0, dtype=self.index.dtype)
        if self._tokens is not None:
            return numpy.frombuffer(self._tokens, dtype=dtype, count=length, offset=start)
        # Each read passes its position, since forked data-loader workers share the position of the file.
        return numpy.frombuffer(_read_exactly(self._file.fileno(), length * dtype.itemsize, start), dtype=dtype)

    @property
    def sequence_lengths(self) -> numpy.ndarray:
        """Tokens of each sequence, [S] int32."""
        return self.index.lengths

    @property
    def document_indices(self) -> numpy.ndarray:
        """Index of the first sequence of each document and, last, the number of sequences, [D + 1] int64."""
        return self.index.document_bounds

    @property
    def sequence_modes(self) -> numpy.ndarray | None:
        """Mode of each sequence of a multimodal corpus, [S] int8; otherwise None."""
        return self.index.modes

    @staticmethod
    def exists(path_prefix: str) -> bool:
        """Return whether both files of a corpus exist."""
        return os.path.isfile(get_idx_path(path_prefix)) and os.path.isfile(get_bin_path(path_prefix))


def _read_exactly(descriptor: int, num_bytes: int, start: int) -> bytes:
    pieces = []
    while num_bytes > 0:
        piece = os.pread(descriptor, num_bytes, start)
        if not piece:
            raise OSError(f"the token file ended at byte {start}: it was {num_bytes} bytes longer when it was opened")
        pieces.append(piece)
        num_bytes, start = num_bytes - len(piece), start + len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
