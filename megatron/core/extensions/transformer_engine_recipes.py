"""Recipes of quantisation by transformer-engine. Importing this file without the package raises ImportError."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from megatron.core.extensions.transformer_engine_layers import recipes, te

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megatron.core.transformer.transformer_config import TransformerConfig


def quantization_recipe(config: TransformerConfig, *, reduce_amax: bool = True) -> Any:
    """Return transformer-engine's recipe for ``config.fp8`` and ``config.fp8_recipe``.

    Args:
        reduce_amax: the largest absolute values of delayed scaling are reduced over ranks.
    """
    fp8_format = recipes.Format.HYBRID if config.fp8 == "hybrid" else recipes.Format.E4M3
    attention: dict[str, Any] = {
        "fp8_dpa": config.fp8_dot_product_attention,
        "fp8_mha": config.fp8_multi_head_attention,
    }
    if config.fp8_recipe == "tensorwise":
        return recipes.Float8CurrentScaling(fp8_format=fp8_format, **attention)
    if config.fp8_recipe == "blockwise":
        return recipes.Float8BlockScaling(fp8_format=fp8_format, **attention)
    return recipes.DelayedScaling(
        margin=config.fp8_margin,
        fp8_format=fp8_format,
        amax_history_len=config.fp8_amax_history_len,
        amax_compute_algo=config.fp8_amax_compute_algo,
        reduce_amax=reduce_amax,
        **attention,
    )


def autocast(recipe: Any, group: ProcessGroup | None) -> AbstractContextManager[Any]:
    """Return a context in which transformer-engine's layers multiply in FP8.

    Args:
        group: ranks over which largest absolute values are reduced; None: all.
    """
    context: AbstractContextManager[Any] = te.autocast(enabled=True, recipe=recipe, amax_reduction_group=group)
    return context


def no_autocast() -> AbstractContextManager[Any]:
    """Return a context in which they do not."""
    context: AbstractContextManager[Any] = te.autocast(enabled=False)
    return context
