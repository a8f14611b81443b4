"""Writer of corpora in Megatron's indexed format."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

import numpy

from megatron.core.datasets.indexed_format import (
    DType,
    check_tokens,
    get_bin_path,
    get_idx_path,
    read_index,
    write_index,
)


class IndexedDatasetBuilder:
    """A writer of one corpus; the corpus can be read after ``finalize`` has written its index.

    Args:
        bin_path: path of the ``.bin`` file, which is overwritten.
        dtype: type of a token in the file.
        multimodal: whether each sequence has a mode.

    Raises:
        ValueError: the format has no code for ``dtype``.
    """

    def __init__(self, bin_path: str, dtype: type[numpy.number] = numpy.int32, multimodal: bool = False) -> None:
        DType.code_from_dtype(dtype)
        self.bin_path = bin_path
        self.dtype = numpy.dtype(dtype).type
        self.multimodal = multimodal
        self.sequence_lengths: list[int] = []
        self.document_indices: list[int] = [0]
        self.sequence_modes: list[int] | None = [] if multimodal else None
        self.data_file = open(bin_path, "wb")  # noqa: SIM115 - closed by finalize

    def add_item(self, tensor: Any, mode: int = 0) -> None:
        """Append one sequence (a tensor, array or list of tokens [n], which may be strings of digits) to the current document.

        Raises:
            ValueError: a token does not fit into the dtype.
        """
        self.sequence_lengths.append(self._write(tensor))
        if self.sequence_modes is not None:
            self.sequence_modes.append(mode)

    def add_document(self, tensor: Any, lengths: Sequence[int], modes: Sequence[int] | None = None) -> None:
        """Append a whole document of tokens [n], cut into sequences of ``lengths`` [s].

        Raises:
            ValueError: the lengths do not sum to n, there is not one mode for each, or a token does not fit into the dtype.
        """
        modes = [0] * len(lengths) if modes is None else modes
        if sum(lengths) != len(tensor) or len(modes) != len(lengths):
            raise ValueError(
                f"{self.bin_path}: a document's sequence lengths must sum to its tokens and have one mode each, "
                f"got {len(tensor)} tokens, lengths {list(lengths)} and {len(modes)} modes"
            )
        self._write(tensor)
        self.sequence_lengths.extend(int(length) for length in lengths)
        self.document_indices.append(len(self.sequence_lengths))
        if self.sequence_modes is not None:
            self.sequence_modes.extend(modes)

    def end_document(self) -> None:
        """End the current document."""
        self.document_indices.append(len(self.sequence_lengths))

    def add_index(self, path_prefix: str) -> None:
        """Append all documents of another corpus.

        Raises:
            ValueError: it has another token type or is damaged.
        """
        idx_path, bin_path = get_idx_path(path_prefix), get_bin_path(path_prefix)
        index = read_index(idx_path, multimodal=self.multimodal)
        check_tokens(index, idx_path, bin_path)
        if index.dtype is not self.dtype:
            raise ValueError(
                f"{idx_path}: a corpus that is merged into {self.bin_path} must hold "
                f"{numpy.dtype(self.dtype).name} tokens, got {numpy.dtype(index.dtype).name}"
            )
        offset = len(self.sequence_lengths)
        self.sequence_lengths.extend(index.lengths.tolist())
        self.document_indices.extend((offset + index.document_bounds[1:]).tolist())
        if self.sequence_modes is not None and index.modes is not None:
            self.sequence_modes.extend(index.modes.tolist())
        with open(bin_path, "rb") as stream:
            shutil.copyfileobj(stream, self.data_file)

    def finalize(self, idx_path: str) -> None:
        """Close the token file and write the index atomically.

        Raises:
            ValueError: the last document was not ended; readers would refuse the index.
        """
        self.data_file.close()
        if self.document_indices[-1] != len(self.sequence_lengths):
            raise ValueError(
                f"{self.bin_path}: the last document must be ended before the index is written, got "
                f"{len(self.sequence_lengths) - self.document_indices[-1]} sequences after it; call end_document()"
            )
        write_index(idx_path, self.dtype, self.sequence_lengths, self.document_indices, self.sequence_modes)

    def _write(self, tensor: Any) -> int:
        source = numpy.asarray(tensor)
        if source.dtype.kind in "SU":  # digits, as some tokenizers return them
            source = source.astype(numpy.int64)
        tokens = source.astype(self.dtype)
        if not numpy.array_equal(tokens, source):
            raise ValueError(
                f"{self.bin_path}: tokens must be {tokens.dtype.name} values, "
                f"got {source.min()} to {source.max()} of {source.dtype.name}; choose a wider dtype"
            )
        self.data_file.write(tokens.tobytes())
        return tokens.size
