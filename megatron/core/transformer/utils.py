"""Megatron-Core's import path of small functions of transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megatron.core.activations import fast_gelu
from megatron.core.dist_checkpointing.model_tensors import (
    _get_extra_state_offsets,
    ensure_metadata_has_dp_cp_group,
    make_sharded_object_for_checkpoint,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)

__all__ = [
    "_get_extra_state_offsets",
    "attention_mask_func",
    "ensure_metadata_has_dp_cp_group",
    "get_linear_layer",
    "is_layer_window_attention",
    "make_sharded_object_for_checkpoint",
    "make_sharded_tensors_for_checkpoint",
    "openai_gelu",
    "sharded_state_dict_default",
]

openai_gelu = fast_gelu


def get_linear_layer(
    rows: int, columns: int, init_method: Callable[[torch.Tensor], object], perform_initialization: bool = True
) -> torch.nn.Linear:
    """Return a linear layer [rows -> columns] with this initialisation and a bias of zeros."""
    layer = torch.nn.Linear(rows, columns)
    if perform_initialization:
        init_method(layer.weight)
    with torch.no_grad():
        layer.bias.zero_()
    return layer


def attention_mask_func(attention_scores: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Write -10000 where a key is hidden, in place, and return the scores."""
    return attention_scores.masked_fill_(attention_mask, -10000.0)


def is_layer_window_attention(
    window_size: tuple[int, int] | None, window_attn_skip_freq: int | Sequence[int] | None, layer_number: int
) -> bool:
    """Return whether a layer, counted from 1, has a window of attention by these settings, which are not served."""
    if not window_size:
        return False
    if window_attn_skip_freq is None:
        return True
    if isinstance(window_attn_skip_freq, int):
        return layer_number % window_attn_skip_freq != 0
    return bool(window_attn_skip_freq[layer_number - 1])
