"""Megatron-Core's import path of the base class of its data-parallel wrappers."""

from megatron.core.transformer.module import MegatronModule


class _BaseDataParallel(MegatronModule):
    """What wraps a model for data parallelism, for callers that ask by ``isinstance``."""


__all__ = ["_BaseDataParallel"]
