"""The part of a sequence that a context-parallel rank holds, and the cut of batches to it.

A sequence is cut into 2 * ranks chunks of equal length, and rank r holds chunks r and 2 * ranks - 1 - r, in this order. Under
a causal mask late chunks see more keys than early ones; with one of each, all ranks have the same work.

Shapes: b batch, s the whole sequence, l = s / ranks what a rank holds, c = l / 2 a chunk.
Source: the cut is Megatron-LM's (and of arXiv:2310.01889's causal variants); the code is ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.distributed import ProcessGroup

from megatron.core.process_groups_config import group_rank, group_size

COMM_TYPES = ("p2p", "all_gather", "a2a")


def comm_types(given: str | Sequence[str] | None) -> list[str]:
    """Return ``cp_comm_type`` as a list: one type for each layer, or one for all. Pure."""
    return [given or "p2p"] if given is None or isinstance(given, str) else list(given)


def comm_type_of_layer(given: str | Sequence[str] | None, layer_number: int) -> str:
    """Return the type of the layer, whose numbers begin at 1. Pure."""
    types = comm_types(given)
    return types[layer_number - 1] if len(types) > 1 else types[0]


def chunk_order(num_ranks: int) -> list[int]:
    """List the [2 * ranks] chunks that ranks 0, 1, ... hold, rank after rank. Pure."""
    return [chunk for rank in range(num_ranks) for chunk in (rank, 2 * num_ranks - 1 - rank)]


def chunk_length(length: int, num_ranks: int) -> int:
    """Return the number of tokens in a chunk of a sequence of ``length``. Pure.

    Raises:
        ValueError: the sequence cannot be cut evenly.
    """
    if length % (2 * num_ranks) != 0:
        raise ValueError(
            f"the sequence length must be a multiple of 2 * context_parallel_size ({2 * num_ranks}), got {length}; change"
            " --seq-length or --context-parallel-size"
        )
    return length // (2 * num_ranks)


def positions_on_this_cp_rank(length: int, cp_group: ProcessGroup | None, device: torch.device) -> torch.Tensor:
    """Return the positions [l], int64 and ascending, that this rank holds of a sequence of ``length``.

    Raises:
        ValueError: the sequence cannot be cut evenly.

    Ranks: each its own part, no communication.
    """
    size, rank = group_size(cp_group), group_rank(cp_group)
    if size == 1:
        return torch.arange(length, device=device)
    chunk = chunk_length(length, size)
    first = torch.arange(chunk, device=device)
    return torch.cat((first + rank * chunk, first + (2 * size - 1 - rank) * chunk))


def get_batch_on_this_cp_rank(
    batch: Mapping[str, torch.Tensor], cp_group: ProcessGroup | None
) -> dict[str, torch.Tensor]:
    """Cut a batch to the tokens of this rank: each tensor [b, s] -> [b, l]; without context parallelism nothing is cut.

    Args:
        batch: tensors by name, [b, s] with a value of each token (tokens, labels, loss_mask, position_ids), or [b] with one
            of each sample (``dataset_id`` of a blend), which all ranks keep.

    Raises:
        ValueError: the sequence cannot be cut evenly, or a tensor is neither [b, s] nor [b].
        NotImplementedError: the batch has an attention mask.

    Ranks: each its own part of the same batch, no communication.
    Source: Megatron-Core's function of this name, which reads the group from globals.
    """
    size, rank = group_size(cp_group), group_rank(cp_group)
    if size == 1:
        return dict(batch)
    if batch.get("attention_mask") is not None:
        raise NotImplementedError(
            "a batch that is cut over context-parallel ranks must have no attention_mask, got one: only the causal mask is"
            " served with context parallelism; leave it out or use --context-parallel-size 1"
        )
    cut: dict[str, torch.Tensor] = {}
    for name, tensor in batch.items():
        if tensor.dim() == 1:
            cut[name] = tensor
            continue
        if tensor.dim() != 2:
            raise ValueError(
                "each tensor of a batch must be [b, s] to be cut along s, or [b] to be kept, got "
                f"{name} {list(tensor.shape)}; give what is not of tokens or samples to the model in another way"
            )
        chunk = chunk_length(tensor.shape[1], size)
        starts = (rank * chunk, (2 * size - 1 - rank) * chunk)
        cut[name] = torch.cat([tensor[:, start : start + chunk] for start in starts], dim=1)
    return cut
