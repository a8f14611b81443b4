"""A cache of index arrays on disk that is never used incomplete or damaged.

A set of arrays is a few ``.npy`` files and a description, which has the size and checksum of each array file. Each file is
written under a temporary name and renamed, the description last. So nothing that a killed builder leaves is used, and
concurrent builders overwrite each other with the same bytes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import IO

import numpy

from megatron.core.regular_file import read_json

logger = logging.getLogger(__name__)

Arrays = Mapping[str, numpy.ndarray]


class IndexCache:
    """The cached arrays of one description in one folder.

    Args:
        folder: folder of the files, created when needed.
        stem: beginning of all file names; contains a hash of the description.
        description: text that says what the arrays are built from; arrays with another description are not used.
        must_write: whether an unwritable folder is an error; if not, the arrays stay in memory.
    """

    def __init__(self, folder: str, stem: str, description: str, *, must_write: bool = True) -> None:
        self.folder = folder
        self.stem = stem
        self.description = description
        self.must_write = must_write

    def load_or_build(self, build: Callable[[], Arrays]) -> Arrays:
        """Return the arrays: mapped from disk where valid files are cached, otherwise built and cached.

        Raises:
            OSError: the folder cannot be written to, and ``must_write``.
        """
        try:
            arrays = self._load()
        except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, RecursionError) as error:
            logger.warning("cached indices %s are damaged (%s); building them again", self._path(""), error)
            arrays = None
        if arrays is not None:
            return arrays
        built = build()
        try:
            self._save(built)
        except OSError as error:
            remedy = "give another folder as path_to_cache (--data-cache-path)"
            if self.must_write:
                raise OSError(f"the index cache {self.folder} must be writable, got: {error}; {remedy}") from error
            logger.warning("indices are not cached, %s cannot be written (%s); %s", self.folder, error, remedy)
            return built
        return self._mapped(built)  # so that this process gives the memory of what it built back

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, f"{self.stem}-{name}")

    def _load(self) -> Arrays | None:
        """Map the arrays; None where nothing is cached; raise ValueError where files and description do not match."""
        if not os.path.isfile(self._path("description.txt")):
            return None
        content = read_json(self._path("description.txt"))
        if not isinstance(content, dict) or content.get("description") != self.description:
            raise ValueError("the description is that of other arrays")
        arrays: dict[str, numpy.ndarray] = {}
        for name, (num_bytes, checksum) in content["files"].items():
            if name != os.path.basename(name):
                raise ValueError(f"{name!r} is not the name of an array")
            path = self._path(f"{name}.npy")
            if os.path.getsize(path) != num_bytes or _checksum(path) != checksum:
                raise ValueError(f"{name}.npy has another size or checksum than was written")
            arrays.update(self._mapped([name]))
        return arrays

    def _mapped(self, names: Iterable[str]) -> Arrays:
        return {name: numpy.load(self._path(f"{name}.npy"), mmap_mode="r", allow_pickle=False) for name in names}

    def _save(self, arrays: Arrays) -> None:
        os.makedirs(self.folder, exist_ok=True)
        files = {}
        for name, array in arrays.items():
            path = self._path(f"{name}.npy")
            with _replacing(path) as stream:
                numpy.save(stream, array, allow_pickle=False)
                stream.flush()
                files[name] = (os.path.getsize(stream.name), _checksum(stream.name))
        with _replacing(self._path("description.txt")) as stream:
            content = {"description": self.description, "files": files}
            stream.write(json.dumps(content, indent=1).encode())


@contextlib.contextmanager
def _replacing(path: str) -> Iterator[IO[bytes]]:
    """Open a temporary file that is renamed to ``path`` after the block, and removed if the block raises."""
    stream = tempfile.NamedTemporaryFile(  # noqa: SIM115 - closed below, before the rename
        dir=os.path.dirname(path), prefix=os.path.basename(path) + ".partial-", delete=False
    )
    try:
        with stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(stream.name, 0o644)  # temporary files are private; a cache may be shared
        os.replace(stream.name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(stream.name)
        raise


def _checksum(path: str) -> int:
    checksum = 0
    with open(path, "rb") as stream:
        while piece := stream.read(1 << 22):
            checksum = zlib.crc32(piece, checksum)
    return checksum
