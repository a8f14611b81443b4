"""Kinds of model, layer, attention mask and attention kernels, under Megatron-Core's names."""

from __future__ import annotations

import enum


class ModelType(enum.Enum):
    """The kind of model that a pipeline schedule runs."""

    encoder_or_decoder = 1


class AttnMaskType(enum.Enum):
    """The keys that a query may see where no mask is given; only ``causal`` is served."""

    padding = 1
    causal = 2
    no_mask = 3
    padding_causal = 4
    arbitrary = 5


class AttnBackend(enum.Enum):
    """The kernels that attention uses; see ``TransformerConfig.attention_backend``."""

    flash = 1
    fused = 2
    unfused = 3
    local = 4
    auto = 5
