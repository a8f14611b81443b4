"""Random numbers of training: dropout is a function of seed, iteration and microbatch alone."""

from __future__ import annotations

import hashlib
import random
from typing import Any, cast

import numpy as np
import torch


def microbatch_seed(seed: int, iteration: int, global_microbatch: int) -> int:
    """A seed in [0, 2**63) that depends on nothing but its arguments; torch's generators start each microbatch from it.

    So dropout is the same on any number of data-parallel ranks with the same micro batch size, and after a resume.
    Tensor-parallel ranks share the seed; see [Note: random streams of tensor ranks] in tensor_parallel/random.py.

    Args:
        iteration: iterations that were completed before.
        global_microbatch: microbatch of the global batch, counted over ranks: ``m * ranks + rank``.

    Source: ours; SHA-256 so that neighbouring arguments give unrelated streams.
    """
    digest = hashlib.sha256(f"dropout/{seed}/{iteration}/{global_microbatch}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def seed_everything(seed: int) -> None:
    """The generators of Python, numpy and torch are at the start of the stream of ``seed``."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state(seed: int) -> dict[str, Any]:
    """Plain values (no tensors) from which ``set_rng_state`` continues; ``seed`` is that of ``microbatch_seed``."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = cast(tuple[str, np.ndarray, int, int, float], np.random.get_state())
    return {
        "seed": seed,
        "python": [version, list(internal), gauss],
        "numpy": [kind, keys.tolist(), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state().numpy().tobytes(),
    }


def set_rng_state(state: dict[str, Any]) -> int:
    """The generators continue from ``state``; returns the seed of ``microbatch_seed``."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8))
    return int(state["seed"])
