"""``fully_shard`` and ``fully_shard_context`` with all that this package adds to its core."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from megatron.core.distributed.fsdp.api import fully_shard as core
from megatron.core.distributed.fsdp.checks.observer import RankObserver
from megatron.core.distributed.fsdp.config.surface import Surface

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")

SURFACE = Surface(observer_class=RankObserver)


def _on_surface(call: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    @functools.wraps(call)
    def on_surface(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
        kwargs.setdefault("surface", SURFACE)
        return call(*args, **kwargs)

    return on_surface


fully_shard = _on_surface(core.fully_shard)
fully_shard_context = _on_surface(core.fully_shard_context)
