"""``item()``, ``float()`` and ``bool()`` of what is computed from sharded tensors: those of the whole.

torch returns this rank's part of a sum or norm that no operation has reduced yet (``float(p.norm())``), without a word.
Delete this file when ``DTensor.item`` redistributes to ``Replicate()``, as torch's strategy for it says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp.dtensor.layers_at_rest import by_torch
from megatron.core.distributed.fsdp.dtensor.random_fill import is_engines

_ITEM = torch.ops.aten._local_scalar_dense.default


def _item(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the number that the whole tensor holds. Ranks: all of the tensor's mesh, where it is not replicated."""
    tensor = args[0]
    if not is_engines(tensor):
        return by_torch(op, args, kwargs)
    is_whole = all(placement.is_replicate() for placement in tensor.placements)
    return op(tensor._local_tensor.detach() if is_whole else tensor.detach().full_tensor())


DTensor._op_dispatcher._custom_op_handlers.setdefault(_ITEM, _item)  # type: ignore[arg-type]
