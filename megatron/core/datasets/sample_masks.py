"""Loss mask, position ids and attention mask of one sample."""

from __future__ import annotations

import torch


def loss_mask_of(tokens: torch.Tensor, *, eod: int, eod_mask_loss: bool) -> torch.Tensor:
    """Make the loss mask [S], float32: 1 everywhere, or with ``eod_mask_loss`` 0 at the end of a document."""
    if eod_mask_loss:
        return (tokens != eod).float()
    return torch.ones(tokens.numel(), dtype=torch.float32)


def position_ids_of(tokens: torch.Tensor, *, eod: int, reset_position_ids: bool) -> torch.Tensor:
    """Make the positions [S], int64, counted from the start of the sample or of each document."""
    positions = torch.arange(tokens.numel(), dtype=torch.int64)
    if not reset_position_ids:
        return positions
    is_start = torch.zeros(tokens.numel(), dtype=torch.bool)
    is_start[1:] = tokens[:-1] == eod
    starts = torch.where(is_start, positions, 0).cummax(dim=0).values
    return positions - starts


def attention_mask_of(tokens: torch.Tensor, *, eod: int, reset_attention_mask: bool) -> torch.Tensor:
    """Make the attention mask [1, S, S], bool, True where a key is hidden: after its query, or in an earlier document."""
    length = tokens.numel()
    hidden = torch.ones(length, length, dtype=torch.bool).triu(diagonal=1)
    if reset_attention_mask:
        document = torch.zeros(length, dtype=torch.int64)
        document[1:] = (tokens[:-1] == eod).cumsum(dim=0)
        hidden |= document[:, None] != document[None, :]
    return hidden.unsqueeze(0)
