"""Attention within a window over sequences that are split over context-parallel ranks.

A chunk of queries needs its own keys and the last ones before it. So ranks gather the tails of all chunks, as long as the
window, and each attends to its two chunks alone, whatever ``cp_comm_type`` says of whole sequences.

Shapes: l tokens of this rank, c = l / 2 a chunk, t = min(window, c) a tail, b batch, n query heads, g key and value heads,
d head width.
Source: ours.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.attention_kernels import BlockKernel
from megatron.core.transformer.context_parallel import chunk_order
from megatron.core.transformer.kernel_attention import kernel_attention


def windowed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    *,
    window: int,
    cp_group: ProcessGroup,
    kernel: BlockKernel,
    scale: float,
) -> Tensor:
    """Compute causal attention [l, b, n, d] of query [l, b, n, d] over the key and value [l, b, g, d] in its window.

    Args:
        sinks: [n] (see ``attention_sinks.py``), or None.
        window: positions before its own that a query sees.

    Ranks: all of ``cp_group``, in forward and backward; on CUDA it does not block the host.
    """
    size, rank = cp_group.size(), cp_group.rank()
    length = query.shape[0] // 2
    widths = [key.shape[-1], value.shape[-1]]
    queries, held = query.unflatten(0, (2, length)), torch.cat((key, value), dim=-1).unflatten(0, (2, length))
    tails = _tails(held, min(window, length), cp_group)
    contexts = []
    for half, chunk in enumerate((rank, 2 * size - 1 - rank)):
        needed = range(max(0, chunk - -(-window // length)), chunk)
        seen = torch.cat([*(tails[before] for before in needed), held[half]])[-(window + length) :]
        keys, values = seen.split(widths, dim=-1)
        q, k, v = (rearrange(x, "s b h d -> b h s d") for x in (queries[half], keys, values))
        context = kernel_attention(q, k, v, sinks, kernel=kernel, scale=scale, window=window)
        contexts.append(rearrange(context, "b h s d -> s b h d"))
    return torch.cat(contexts)


def _tails(held: Tensor, length: int, cp_group: ProcessGroup) -> dict[int, Tensor]:
    """Gather the last keys and values [t, b, g, 2 * d] of all chunks from those of this rank's two, [2, c, b, g, 2 * d]."""
    if length == 0:
        return {}
    own = held[:, held.shape[1] - length :].flatten(0, 1)
    gathered = gather_from_sequence_parallel_region(own, group=cp_group).split(length)
    return dict(zip(chunk_order(cp_group.size()), gathered, strict=True))
