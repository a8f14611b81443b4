"""Keeps the engine's own operations out of what users put around forwards: transforms and selective checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

_SELECTIVE_CHECKPOINTS = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)


@contextmanager
def hidden_from_user() -> Iterator[None]:
    """Run what the scope does outside of transforms of ``torch.func`` and of selective activation checkpoints.

    Casts and all-gathers write to memory that was made outside of a transform. A selective checkpoint saves results of operations in
    forward and leaves these operations out when it recomputes: of a saved all-gather, weights would never arrive. Other dispatch
    modes (``FakeTensorMode``, counters of FLOPs) see the engine's operations.
    """
    modes = _get_current_dispatch_mode_stack()
    first = next((at for at, mode in enumerate(modes) if isinstance(mode, _SELECTIVE_CHECKPOINTS)), len(modes))
    above = [_pop_mode() for _ in modes[first:]][::-1]
    others = [mode for mode in above if not isinstance(mode, _SELECTIVE_CHECKPOINTS)]
    for mode in others:
        _push_mode(mode)
    try:
        with torch._C._DisableFuncTorch():
            yield
    finally:
        for _ in others:
            _pop_mode()
        for mode in above:
            _push_mode(mode)
