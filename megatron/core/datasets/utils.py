"""Names at Megatron-Core's import path; the code is in ``split.py`` and ``blend.py``."""

from megatron.core.datasets.blend import get_blend_from_list
from megatron.core.datasets.split import Split, normalize

__all__ = ["Split", "compile_helpers", "get_blend_from_list", "normalize"]


def compile_helpers() -> None:
    """Do nothing: the index builders are vectorised numpy, and nothing must be compiled."""
