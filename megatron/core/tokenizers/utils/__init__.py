"""Megatron-Core's import path of the builder of tokenizers."""
