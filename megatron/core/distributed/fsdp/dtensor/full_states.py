"""Full state dicts of one rank that ``torch.distributed.checkpoint.state_dict`` broadcasts (``broadcast_from_rank0=True``).

It takes each rank's part of a tensor to be one box of evenly split rows, and broadcasts int16 tensors (the remainders of bf16
weights) as they are, which no backend does. Here parts are those that placements say, and what travels are bits.
Delete this file when both are so in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed._state_dict_utils as torch_state_dicts

from megatron.core.distributed.fsdp.dtensor.local_parts import placed_like
from megatron.core.distributed.fsdp.dtensor.random_fill import local_rows
from megatron.core.distributed.fsdp.dtensor.uneven_shard import UnevenShard

_Patched = Callable[..., None]


def _broadcast(
    broadcast: _Patched, full: dict[str, Any], local: dict[str, Any], keys: Sequence[str], *others: Any, **named: Any
) -> None:
    """Broadcast tensors of the first rank, int16 ones as bits. Ranks: all; ``full`` holds sizes and dtypes on the others."""
    narrow = {key: full[key] for key in keys if full[key].dtype == torch.int16}
    as_bits = {
        key: value.view(torch.float16) if isinstance(value, torch.Tensor) else value._replace(dtype=torch.float16)
        for key, value in narrow.items()
    }
    broadcast({**full, **as_bits}, local, keys, *others, **named)
    for key in narrow:
        value = local.get(key)
        if isinstance(value, torch.Tensor) and value.dtype == torch.float16:
            local[key] = value.view(torch.int16)


@torch.no_grad()
def _distribute(distribute: _Patched, local: dict[str, Any], keys: Sequence[str], *others: Any, **named: Any) -> None:
    """Keep this rank's part of each whole tensor; ``local`` holds (DTensor to fill, whole tensor), and gets the DTensor."""
    for key in keys:
        if not isinstance(local.get(key), tuple):
            continue
        state, whole = local[key]
        if any(isinstance(placement, UnevenShard) for placement in state.placements) or state.dtype == torch.int16:
            rows = local_rows(state, whole.view(torch.int16) if state.dtype == torch.int16 else whole)
            if state.is_meta:
                state = placed_like(state, rows.clone())
            else:
                state._local_tensor.copy_(rows)
            local[key] = state
    distribute(local, keys, *others, **named)


def _wrapped(patched: Callable[..., None], original: _Patched) -> _Patched:
    def call(*args: Any, **kwargs: Any) -> None:
        patched(original, *args, **kwargs)

    return call


torch_state_dicts._broadcast_tensors = _wrapped(_broadcast, torch_state_dicts._broadcast_tensors)
torch_state_dicts._distribute_tensors = _wrapped(_distribute, torch_state_dicts._distribute_tensors)
