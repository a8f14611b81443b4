"""Kinds of models and of recipes, under Megatron-Core's names."""

from __future__ import annotations

import enum


class ModelType(enum.Enum):
    """The kind of model that a pipeline schedule runs."""

    encoder_or_decoder = 1


class Fp8Recipe(enum.StrEnum):
    """Values of ``TransformerConfig.fp8_recipe``; those that are not served are refused there."""

    delayed = "delayed"
    tensorwise = "tensorwise"
    mxfp8 = "mxfp8"
    blockwise = "blockwise"
    custom = "custom"


class Fp4Recipe(enum.StrEnum):
    """Values of ``TransformerConfig.fp4_recipe``; FP4 is refused there."""

    nvfp4 = "nvfp4"
    custom = "custom"
