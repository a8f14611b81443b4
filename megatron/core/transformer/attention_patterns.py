"""Which layers attend within a window, which rotate queries and keys, and which have linear attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


def window_of_layer(config: TransformerConfig, layer_number: int) -> int | None:
    """Return how many positions before its own a query of this layer (counted from 1) sees; None: all of them.

    Source: Megatron-Core's ``window_size`` and ``window_attn_skip_freq``.
    """
    if config.window_size is None or config.window_size[0] < 0:
        return None
    skips = config.window_attn_skip_freq
    if skips is None:
        in_window = True
    elif isinstance(skips, int):
        in_window = layer_number % skips != 0
    else:
        in_window = bool(skips[layer_number - 1])
    return config.window_size[0] if in_window else None


def rotates(config: TransformerConfig, layer_number: int) -> bool:
    """Return whether this layer (counted from 1) applies rotary positions where the model has them.

    Source: Megatron-Core's ``no_rope_freq``.
    """
    skips = config.no_rope_freq
    if skips is None:
        return True
    return layer_number % skips != 0 if isinstance(skips, int) else not skips[layer_number - 1]


def is_linear(config: TransformerConfig, layer_number: int) -> bool:
    """Return whether this layer (counted from 1) has linear attention.

    Source: Megatron-Core's ``experimental_attention_variant`` and ``linear_attention_freq``.
    """
    pattern = config.linear_attention_freq
    if config.experimental_attention_variant is None or pattern is None:
        return False
    return layer_number % pattern != 0 if isinstance(pattern, int) else bool(pattern[layer_number - 1])


def is_pattern(value: object, num_layers: int) -> bool:
    """Return whether a value is a positive number, or holds 0 or 1 for each layer."""
    if isinstance(value, int):
        return value >= 1
    return isinstance(value, Sequence) and len(value) == num_layers and set(value) <= {0, 1}
