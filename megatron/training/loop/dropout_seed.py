"""Random numbers of training: dropout depends on seed, iteration and microbatch alone."""

from __future__ import annotations

import hashlib
import random
from typing import Any, cast

import numpy as np
import torch


def microbatch_seed(seed: int, iteration: int, global_microbatch: int) -> int:
    """Compute the seed, in [0, 2**63), of torch's generators for a microbatch from the arguments alone.

    So dropout is the same on any number of data-parallel ranks with the same micro batch size, and after a resume.
    Tensor-parallel ranks share the seed; see [Note: random streams of tensor ranks] in tensor_parallel/random.py.

    Args:
        iteration: number of completed iterations.
        global_microbatch: index of the microbatch in the global batch, counted over ranks: ``m * ranks + rank``.

    Source: ours; SHA-256, so that neighbouring arguments give unrelated streams.
    """
    digest = hashlib.sha256(f"dropout/{seed}/{iteration}/{global_microbatch}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state(seed: int) -> dict[str, Any]:
    """Return the state of all generators, without tensors, for ``set_rng_state``; ``seed`` is that of ``microbatch_seed``."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = cast(tuple[str, np.ndarray, int, int, float], np.random.get_state())
    return {
        "seed": seed,
        "python": [version, list(internal), gauss],
        "numpy": [kind, keys.tolist(), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state().numpy().tobytes(),
    }


def fresh_rng_state(seed: int) -> dict[str, Any]:
    """Return the state that the generators have after ``seed_everything``; changes none in use."""
    version, internal, gauss = random.Random(seed).getstate()
    kind, keys, position, has_gauss, cached = cast(
        tuple[str, np.ndarray, int, int, float], np.random.RandomState(seed % 2**32).get_state()
    )
    return {
        "seed": seed,
        "python": [version, list(internal), gauss],
        "numpy": [kind, keys.tolist(), int(position), int(has_gauss), float(cached)],
        "torch": torch.Generator().manual_seed(seed).get_state().numpy().tobytes(),
    }


def check_rng_state(state: Any) -> None:
    """Raise a ValueError unless ``set_rng_state`` takes the state; changes no generator in use."""
    try:
        version, internal, gauss = state["python"]
        random.Random().setstate((version, tuple(internal), gauss))
        kind, keys, position, has_gauss, cached = state["numpy"]
        np.random.RandomState().set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
        torch.Generator().set_state(torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8))
        int(state["seed"])
    except (KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"the state of random numbers must be as it was saved, got {error!r}") from error


def set_rng_state(state: dict[str, Any]) -> int:
    """Restore the generators from ``state``; return the seed of ``microbatch_seed``."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8))
    return int(state["seed"])
