"""Kinds of model, layer, attention mask and attention kernels, under Megatron-Core's names."""

from __future__ import annotations

import enum

from megatron.core.enums import ModelType

__all__ = ["AttnBackend", "AttnMaskType", "AttnType", "CudaGraphModule", "CudaGraphScope", "LayerType", "ModelType"]


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


class CudaGraphModule(enum.Enum):
    """Parts of a layer that a CUDA graph of its own may hold; none is served, a graph holds a whole step."""

    attn = 1
    mlp = 2
    moe = 3
    moe_router = 4
    moe_preprocess = 5
    mamba = 6


class CudaGraphScope(enum.Enum):
    """The older name of ``CudaGraphModule``, which checkpoints hold."""

    full_iteration = 1
    attn = 2
    mlp = 3
    moe = 4
    moe_router = 5
    moe_preprocess = 6
    mamba = 7
    full_iteration_inference = 8
