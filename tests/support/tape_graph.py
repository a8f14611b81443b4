"""A CUDA graph's stand-in on the CPU: what a function does to memory is written down, and done again without Python.

What a replay repeats is what a graph would: the same operations on the same memory, with whatever Python numbers the
captured call had. So state that lives on the host and should live on the device shows, also where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.capture_streams import CaptureStreams
from tests.support.float8_weights import DequantizedWeight


class _Recorder(TorchDispatchMode):
    """Runs what is dispatched, and appends a repetition of it to ``acts``."""

    def __init__(self, acts: list[Callable[[], object]]) -> None:
        super().__init__()
        self._acts = acts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor | DequantizedWeight) for kind in types):
            return NotImplemented  # its local operations come here
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("a step that is captured must not read values on the host")
        result = func(*args, **kwargs)
        if func.namespace == "profiler":
            return result
        inputs = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        written = [
            leaf if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in inputs else None
            for leaf in tree_leaves(result)
        ]
        self._acts.append(lambda: _repeat(func, args, kwargs, written))
        return result


def _repeat(func: Any, args: Any, kwargs: Any, written: list[Tensor | None]) -> None:
    for new, kept in zip(tree_leaves(func(*args, **kwargs)), written, strict=True):
        if isinstance(new, torch.ScriptObject):
            new.wait()  # type: ignore[attr-defined]  # a collective's work
        elif kept is not None:
            kept.copy_(new)


class TapeGraph:
    """A ``StepGraph`` on the CPU.

    A capture runs the function, and puts ``persistent()`` tensors back afterwards: a graph's capture does no work. As a
    graph has memory of its own, no storage gives its memory back until ``close``.

    Args:
        persistent: gives what a step leaves to the next one: weights and optimizer state, as plain tensors.
        streams: are told of the capture.
    """

    def __init__(self, persistent: Callable[[], Sequence[Tensor]], streams: CaptureStreams | None = None) -> None:
        self.persistent, self.streams = persistent, streams
        self.num_replays = 0
        self.is_capturing = False
        self._acts: list[Callable[[], object]] = []
        self._seeds: Sequence[int] = ()
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = _growing(self._resize)  # type: ignore[method-assign]

    @contextmanager
    def warmup(self) -> Iterator[None]:
        yield

    def capture(self, function: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        before = [tensor.detach().clone() for tensor in self.persistent()]
        in_capture = nullcontext() if self.streams is None else self.streams.capture()
        self.is_capturing = True
        with in_capture, _Recorder(self._acts), patch("torch.get_rng_state", _no_random_state):
            results = function()
        self.is_capturing = False
        with torch.no_grad(), self._uncounted():
            for tensor, value in zip(self.persistent(), before, strict=True):
                tensor.copy_(value)
        for result in results.values():
            result.fill_(float("nan"))  # no replay has written it
        return results

    def draw(self, index: int) -> None:
        self._acts.append(lambda: torch.manual_seed(self._seeds[index]))

    def replay(self, seeds: Sequence[int]) -> None:
        self._seeds = seeds
        self.num_replays += 1
        with torch.no_grad(), self._uncounted():
            for act in self._acts:
                act()

    def _uncounted(self) -> AbstractContextManager[None]:
        """A scope in which writes are not counted as autograd counts them: a graph's are not either."""
        return torch.autograd._unsafe_preserve_version_counter(tuple(self.persistent()))

    def close(self) -> None:
        self._acts.clear()
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]


def _no_random_state() -> Tensor:
    raise RuntimeError("the state of a generator cannot be read in a capture")


def _growing(resize: Callable[..., Any]) -> Callable[..., Any]:
    def grow(storage: torch.UntypedStorage, nbytes: int) -> None:
        if nbytes > storage.nbytes():
            resize(storage, nbytes)

    return grow
