"""Building on one rank of each node first, so that the others find its caches."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from megatron.core.distributed.fsdp.checkpoint import agree

Built = TypeVar("Built")


def build_once_per_node(build: Callable[[], Built]) -> Built:
    """Call ``build`` on local rank 0 of each node first, then on the other ranks, which find its caches.

    Without ``LOCAL_RANK`` in the environment, rank 0 alone goes first. Without a process group this process just builds.

    Raises:
        Exception: ``build`` failed on a local rank 0; raised on all ranks, also where there is one, see ``agree``.

    Ranks: all must call it; blocks until every local rank 0 has built.
    Source: ours.
    """
    if not dist.is_initialized():
        return build()
    is_first = int(os.environ.get("LOCAL_RANK", dist.get_rank())) == 0
    built: list[Built] = []

    def build_first() -> None:
        if is_first:
            built.append(build())

    agree(build_first, lambda _: None)
    return built[0] if is_first else build()
