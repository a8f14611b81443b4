"""The memory of live tensors, counted as CUDA's caching allocator would."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch

ALLOCATION_NBYTES = 512  # what CUDA's caching allocator rounds sizes up to


class Birth(NamedTuple):
    """When memory was allocated: its number in order, whether in a backward, and the shape of the tensor."""

    number: int
    in_backward: bool
    shape: tuple[int, ...]


class Ledger:
    """Bytes of live tensors, as CUDA's caching allocator would count them.

    Attributes:
        live: bytes now.
        peak: the most since ``restart``.
        sizes: of live memory, by the address of its storage.
        born: when it was allocated, likewise.
        host: bytes of page-locked memory now, which is the host's.
        at_peak: called whenever the peak grows to ``looks_from`` bytes or more; None: nothing is.
    """

    def __init__(self) -> None:
        self.live = self.peak = 0
        self.sizes: dict[int, int] = {}
        self.born: dict[int, Birth] = {}
        self.num_births = 0
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._uncounted = 0
        self.at_peak: Callable[[], None] | None = None
        self.looks_from = 0
        self.host = 0
        self._of_host: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def restart(self) -> None:
        """Begin to look for the peak anew."""
        self.peak = self.live

    def note(self, tensor: torch.Tensor) -> None:
        """Count the memory of a tensor, if it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._references:
            self.resized(storage)
            return
        if key in self._of_host:
            return
        self._references[key] = weakref.ref(storage, partial(self._forget, key))
        self.num_births += 1
        is_backward = torch._C._current_graph_task_id() != -1
        self.born[key] = Birth(self.num_births, is_backward, tuple(tensor.shape))
        self._set(key, storage.nbytes())

    def note_of_host(self, tensor: torch.Tensor) -> None:
        """Count the memory of a new tensor in page-locked memory."""
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()

        def forget(_: object) -> None:
            del self._of_host[key]
            self.host -= nbytes

        self._of_host[key] = weakref.ref(storage, forget)
        self.host += nbytes

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Follow a storage that may have another size now."""
        key = storage._cdata
        if key in self._references:
            self._set(key, storage.nbytes())

    @contextmanager
    def uncounted_temporaries(self) -> Iterator[None]:
        """Leave what is freed before the scope ends out of the peak: a fused kernel has no such memory."""
        self._uncounted += 1
        try:
            yield
        finally:
            self._uncounted -= 1
            self._grow()

    def _set(self, key: int, nbytes: int) -> None:
        size = -(-nbytes // ALLOCATION_NBYTES) * ALLOCATION_NBYTES
        self.live += size - self.sizes.get(key, 0)
        self.sizes[key] = size
        self._grow()

    def _grow(self) -> None:
        if self.live > self.peak and not self._uncounted:
            self.peak = self.live
            if self.at_peak is not None and self.live >= self.looks_from:
                self.at_peak()

    def _forget(self, key: int, _: object) -> None:
        self._references.pop(key, None)
        self.born.pop(key, None)
        self.live -= self.sizes.pop(key, 0)
