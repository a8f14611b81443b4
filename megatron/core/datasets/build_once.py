"""Building on one rank of each node first, so that the others find its caches."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

Built = TypeVar("Built")


def build_once_per_node(build: Callable[[], Built]) -> Built:
    """Call ``build`` on local rank 0 of each node first, then on the other ranks, which find its caches.

    Without ``LOCAL_RANK`` in the environment, rank 0 alone goes first. A single process just builds.

    Raises:
        RuntimeError: ``build`` failed on a local rank 0; raised on every other rank, with the message of the failure.

    Ranks: all must call it; blocks until every local rank 0 has built.
    Source: ours.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return build()
    is_first = int(os.environ.get("LOCAL_RANK", dist.get_rank())) == 0
    built, failure = None, None
    if is_first:
        try:
            built = build()
        except Exception as error:  # raised below, after the waiting ranks were told
            failure = error
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    for rank, message in enumerate(messages):
        if message is not None:
            raise RuntimeError(f"rank {rank} could not build the datasets: {message}")
    return built if is_first else build()  # type: ignore[return-value]
