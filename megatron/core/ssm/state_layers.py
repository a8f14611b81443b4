"""What layers that carry a state through the sequence share: their projections, what they refuse, and what runs their states.

Shapes: s sequence, b batch, h hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from megatron.core.extensions import why_missing
from megatron.core.process_groups_config import group_size
from megatron.core.transformer.recomputation import recomputes
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.transformer_config import TransformerConfig

DECAY_RATES = (1.0, 16.0)
"""Range that initial decay rates are drawn from."""


def projection_in(
    spec: ModuleSpec | type, config: TransformerConfig, width: int, tp_group: ProcessGroup | None, *, bias: bool = False
) -> Any:
    """Build the projection [s, b, h] -> [s, b, width], whose outputs the ranks of ``tp_group`` divide."""
    return build_module(
        spec,
        config.hidden_size,
        width,
        config=config,
        init_method=config.init_method,
        gather_output=False,
        bias=bias,
        skip_bias_add=False,
        tp_group=tp_group,
    )


def projection_out(
    spec: ModuleSpec | type, config: TransformerConfig, width: int, tp_group: ProcessGroup | None, *, bias: bool = False
) -> Any:
    """Build the projection [s, b, width] -> [s, b, h], whose inputs the ranks of ``tp_group`` divide; the caller adds its bias."""
    return build_module(
        spec,
        width,
        config.hidden_size,
        config=config,
        init_method=config.output_layer_init_method,
        bias=bias,
        input_is_parallel=True,
        skip_bias_add=True,
        tp_group=tp_group,
    )


def check_alone(cp_group: ProcessGroup | None, context_parallel_size: int, cp_comm_type: str | None = None) -> None:
    """Refuse layers whose sequence is split over context-parallel ranks.

    Raises:
        NotImplementedError: it is.
    """
    if group_size(cp_group) > 1 or context_parallel_size > 1:
        raise NotImplementedError(
            "layers with a state must not be split over context-parallel ranks, got"
            f" {max(group_size(cp_group), context_parallel_size)} (cp_comm_type {cp_comm_type!r}); use context_parallel_size 1"
        )


def check_causal(what: str, attention_mask: torch.Tensor | None, packed: PackedSeqParams | None) -> None:
    """Refuse masks and packs.

    Raises:
        NotImplementedError: there is one.
    """
    if attention_mask is not None:
        raise NotImplementedError(
            f"attention_mask must be None with {what}, got a tensor: a state has all tokens before"
        )
    if packed is not None and packed.is_packed:
        raise NotImplementedError(
            f"packed_seq_params must be None with {what}, got samples to keep apart: states are not reset within a sequence"
        )


def recomputed(
    function: Callable[..., torch.Tensor], config: TransformerConfig, *, training: bool
) -> Callable[..., torch.Tensor]:
    """Return the function, or one that backward computes again where ``core_attn`` is to be recomputed."""
    if not (training and recomputes(config, "core_attn")):
        return function
    return partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)


def package_serves(package: str, x: torch.Tensor, config: TransformerConfig) -> bool:
    """Return whether the kernels of a package compute with ``x``. They repeat no run bit by bit."""
    is_served = x.is_cuda and x.dtype != torch.float32 and not config.deterministic_mode
    return is_served and why_missing(package) is None
