"""Megatron-Core's import path of the base class of its data-parallel wrappers."""

from megatron.core.transformer.module import MegatronModule


class _BaseDataParallel(MegatronModule):
    """Base class of data-parallel wrappers, for ``isinstance`` checks."""


__all__ = ["_BaseDataParallel"]
