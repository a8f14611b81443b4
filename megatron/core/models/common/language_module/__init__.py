"""Megatron-Core's import path of the base class of language models."""
