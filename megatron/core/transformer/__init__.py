"""Transformer modules under Megatron-Core's names."""

import importlib
from typing import TYPE_CHECKING, Any

from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

__all__ = [
    "MLATransformerConfig",
    "MegatronModule",
    "ModuleSpec",
    "TransformerConfig",
    "TransformerLayer",
    "TransformerLayerSubmodules",
    "build_module",
]


def __getattr__(name: str) -> Any:
    """Import layers at first use: they import modules of this package."""
    if name in ("TransformerLayer", "TransformerLayerSubmodules"):
        return getattr(importlib.import_module("megatron.core.transformer.transformer_layer"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
