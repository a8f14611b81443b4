"""Exchange of unequal pieces between ranks, for what must be whole on one of them: matrices of an optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core.distributed.fsdp.config.torch_versions import all_gather_flat


def begin_exchange(
    group: ProcessGroup,
    received: torch.Tensor,
    sent: torch.Tensor,
    *,
    received_numels: Sequence[int],
    sent_numels: Sequence[int],
) -> Any:
    """Begin to send rank k the k-th piece of ``sent``, and to receive its piece for this rank; return a handle.

    ``handle.wait()`` makes the current stream wait (on the CPU, the host). Until then neither tensor may be touched.

    Args:
        received_numels, sent_numels: [ranks] elements of the pieces, which lie one behind the other.

    Ranks: all of the group, in one order.
    """
    return dist.all_to_all_single(received, sent, list(received_numels), list(sent_numels), group=group, async_op=True)


def gather_parts(part: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Return all ranks' ``part`` [...] as [ranks, ...], in rank order. Ranks: all of the group."""
    parts = torch.empty((group.size(), *part.shape), dtype=part.dtype, device=part.device)
    all_gather_flat(group, parts.view(-1), part.reshape(-1))
    return parts


def sum_over(tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Replace ``tensor`` by its sum over the ranks, and return it. Ranks: all of the group."""
    dist.all_reduce(tensor, group=group)
    return tensor
