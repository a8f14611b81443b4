"""Names that Megatron-Core keeps here; the code is in ``split.py`` and ``blend.py``."""

from megatron.core.datasets.blend import get_blend_from_list
from megatron.core.datasets.split import Split, normalize

__all__ = ["Split", "compile_helpers", "get_blend_from_list", "normalize"]


def compile_helpers() -> None:
    """Return at once: the index builders are vectorised numpy here, and nothing is compiled."""
