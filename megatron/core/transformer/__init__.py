"""Transformer modules under Megatron-Core's names."""

from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = ["MegatronModule", "ModuleSpec", "TransformerConfig", "build_module"]
