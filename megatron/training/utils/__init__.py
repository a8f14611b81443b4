"""Megatron-LM's import path of small functions of training."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core._rank_utils import safe_get_rank
from megatron.core.datasets.blend import get_blend_from_list
from megatron.core.model_wrappers import unwrap_model

__all__ = [
    "average_losses_across_data_parallel_group",
    "get_blend_and_blend_per_split",
    "get_ltor_masks_and_position_ids",
    "is_first_or_last_pipeline_stage",
    "is_hybrid_model",
    "is_last_rank",
    "print_rank_0",
    "print_rank_last",
    "unwrap_model",
]


def is_last_rank() -> bool:
    """Return whether this is the last rank of the run."""
    return not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1


def print_rank_0(message: object, rank: int | None = None) -> None:
    """Print on rank 0, before process groups exist too; ``rank`` None: this process's."""
    if (safe_get_rank() if rank is None else rank) == 0:
        print(message, flush=True)


def print_rank_last(message: object) -> None:
    """Print on the last rank."""
    if is_last_rank():
        print(message, flush=True)


def is_first_or_last_pipeline_stage(vp_stage: int | None = None) -> bool:
    """Return whether this rank's stage has the embedding or the output layer."""
    if not parallel_state.is_initialized():
        return True
    is_first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    return is_first or parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)


def is_hybrid_model(args: Namespace) -> bool:
    """Return whether the model has state-space layers: never."""
    return False


def average_losses_across_data_parallel_group(
    losses: Sequence[torch.Tensor], group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Return the means [n] of losses over a group; None: the data-parallel ranks. Ranks: all of the group."""
    averaged = torch.stack([loss.detach().view([]) for loss in losses])
    group = parallel_state.get_data_parallel_group() if group is None else group
    dist.all_reduce(averaged, group=group)
    return averaged / group.size()


def get_blend_and_blend_per_split(args: Namespace) -> tuple[Any, Any]:
    """Return (the blend of ``--data-path``, those of the three splits), as the datasets take them; None where not given."""
    per_split = [getattr(args, f"{name}_data_path", None) for name in ("train", "valid", "test")]
    blends = [get_blend_from_list(path) for path in per_split] if any(per_split) else None
    return get_blend_from_list(args.data_path), blends


def get_ltor_masks_and_position_ids(
    data: torch.Tensor,
    eod_token: int,
    pad_token: int,
    reset_position_ids: bool,
    reset_attention_mask: bool,
    eod_mask_loss: bool,
    pad_mask_loss: bool,
    create_attention_mask: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Return the attention mask [b or 1, 1, s, s], True where a key is hidden, the loss mask and the positions, both [b, s].

    Args:
        data: [b, s] tokens.
        reset_position_ids, reset_attention_mask: positions and attention begin anew after an end of document.
        eod_mask_loss, pad_mask_loss: leave what follows these tokens out of the loss.
        create_attention_mask: False returns None in place of the mask.

    Raises:
        ValueError: attention is to begin anew, and no mask is to be made.
    """
    if reset_attention_mask and not create_attention_mask:
        raise ValueError(
            "reset_attention_mask needs create_attention_mask=True: the mask says where attention begins anew"
        )
    rows, length = data.shape
    mask = torch.ones((1, length, length), dtype=torch.bool, device=data.device).triu(diagonal=1)
    loss_mask = torch.ones((rows, length), device=data.device)
    if eod_mask_loss:
        loss_mask[data == eod_token] = 0.0
    if pad_mask_loss:
        loss_mask[data == pad_token] = 0.0
    positions = torch.arange(length, device=data.device).expand(rows, length)
    # Documents are counted from the token behind an end of document on.
    ends = data == eod_token
    documents = ends.cumsum(dim=1) - ends.long()
    if reset_attention_mask:
        mask = mask | (documents[:, :, None] != documents[:, None, :])
    if reset_position_ids:
        begins = torch.zeros_like(data)
        begins[:, 1:] = torch.where(ends[:, :-1], positions[:, 1:], 0)
        positions = positions - begins.cummax(dim=1).values
    return mask[:, None] if create_attention_mask else None, loss_mask, positions.contiguous()
