"""Lets one rank of each node build what is cached on disk, and the others read it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

Built = TypeVar("Built")


def build_once_per_node(build: Callable[[], Built]) -> Built:
    """Call ``build`` on each rank: on local rank 0 first, then on the others, which find the caches that it filled.

    Raises:
        RuntimeError: on every rank, where ``build`` failed on a local rank 0; the message is that failure's.

    Ranks: all must call it; blocks until every local rank 0 has built. One process alone just builds.
    Source: ours; where ``LOCAL_RANK`` is not set, rank 0 is the only one that goes first.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return build()
    is_first = int(os.environ.get("LOCAL_RANK", dist.get_rank())) == 0
    built, failure = None, None
    if is_first:
        try:
            built = build()
        except Exception as error:  # the other ranks wait for this one, so they must hear of it
            failure = error
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    for rank, message in enumerate(messages):
        if message is not None:
            raise RuntimeError(f"rank {rank} could not build the datasets: {message}")
    return built if is_first else build()  # type: ignore[return-value]
