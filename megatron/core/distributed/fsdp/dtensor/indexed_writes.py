"""Writes to sharded DTensors by index (``weight[[1, 3]] = 0``, ``torch.nn.init.sparse_``): those to the whole tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp.codec.hooked_tensor import memory_of
from megatron.core.distributed.fsdp.dtensor.layers_at_rest import by_torch
from megatron.core.distributed.fsdp.dtensor.random_fill import is_engines, local_rows, write_part


def _index_put(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write what plain ``values`` at plain ``indices`` of the whole tensor leave for this rank's part of it.

    Where ranks differ, the parts are each rank's, and replicas are made equal to the first one.

    Ranks: all of the tensor's mesh.
    """
    target, indices, values, *rest = args
    if not is_engines(target) or any(isinstance(tensor, DTensor) for tensor in (*indices, values)):
        return by_torch(op, args, kwargs)
    accumulates = rest[0] if rest else kwargs.get("accumulate", False)
    whole = torch.zeros(target.shape, dtype=target.dtype, device=target.device)
    op(whole, indices, values, accumulates)
    is_written = torch.zeros(target.shape, dtype=torch.bool, device=target.device)
    op(is_written, indices, torch.ones((), dtype=torch.bool, device=target.device))
    local, part = memory_of(target._local_tensor, writes=False), local_rows(target, whole)
    write_part(target, torch.where(local_rows(target, is_written), local + part if accumulates else part, local))
    return target


DTensor._op_dispatcher._custom_op_handlers.setdefault(torch.ops.aten.index_put_.default, _index_put)  # type: ignore[arg-type]
