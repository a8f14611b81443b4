"""Megatron-LM's import path of ``initialize_megatron``."""

from megatron.training.library.run import initialize_megatron

__all__ = ["initialize_megatron"]
