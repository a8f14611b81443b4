"""What the fields of routers and shared experts must hold; those of experts' places are in ``parallel_checks``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

MOE_CONTRADICTIONS: list[tuple[Callable[[TransformerConfig], bool], str]] = [
    (
        lambda c: c.moe_router_pre_softmax and c.moe_router_score_function != "softmax",
        "moe_router_pre_softmax must go with moe_router_score_function='softmax', got {moe_router_score_function!r}",
    ),
    (
        lambda c: c.moe_shared_expert_gate and c.moe_shared_expert_intermediate_size is None,
        "moe_shared_expert_gate must go with moe_shared_expert_intermediate_size, got None",
    ),
    (
        lambda c: c.moe_shared_expert_intermediate_size is not None and c.add_bias_linear,
        "moe_shared_expert_intermediate_size must go with add_bias_linear=False, got True: shared experts have no bias",
    ),
    (
        lambda c: (
            c.num_moe_experts is not None
            and c.add_bias_linear
            and (c.expert_tensor_parallel_size or c.tensor_model_parallel_size) > 1
        ),
        "add_bias_linear must be off where experts are split over tensor-parallel ranks, got True: each rank would add"
        " the bias of the second layer; turn it off or set expert_tensor_parallel_size=1",
    ),
]
"""As ``config_checks.CONTRADICTIONS``."""
