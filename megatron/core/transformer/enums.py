"""Kinds of model, layer, attention mask and attention kernels, under Megatron-Core's names."""

from __future__ import annotations

import enum

from megatron.core.enums import ModelType

__all__ = ["AttnBackend", "AttnMaskType", "AttnType", "LayerType", "ModelType"]


class AttnMaskType(enum.Enum):
    """The keys that a query may see where no mask is given; only ``causal`` is served."""

    padding = 1
    causal = 2
    no_mask = 3
    padding_causal = 4
    arbitrary = 5


class LayerType(enum.Enum):
    """The kind of a layer in a pipeline's layout; only embedding, decoder and loss are served."""

    embedding = 1
    loss = 2
    encoder = 3
    decoder = 4
    mtp = 5


class AttnType(enum.Enum):
    """What attention attends to; only ``self_attn`` is served."""

    self_attn = 1
    cross_attn = 2


class AttnBackend(enum.Enum):
    """The kernels that attention uses; see ``TransformerConfig.attention_backend``."""

    flash = 1
    fused = 2
    unfused = 3
    local = 4
    auto = 5
