"""What the mixture-of-experts fields of a TransformerConfig must hold: a table of (condition, message)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

BALANCING_TYPES = ("aux_loss", "seq_aux_loss", "none")
SCORE_FUNCTIONS = ("softmax", "sigmoid")
DROP_POLICIES = ("probs", "position")
_NEEDS_EXPERTS = (
    "moe_ffn_hidden_size",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_shared_expert_intermediate_size",
    "moe_grouped_gemm",
    "moe_expert_capacity_factor",
)

MOE_CONTRADICTIONS: list[tuple[Callable[[TransformerConfig], bool], str]] = [
    (
        lambda c: c.num_moe_experts is not None and c.num_moe_experts < 1,
        "num_moe_experts must be at least 1 (or None for a dense model), got {num_moe_experts}",
    ),
    (
        lambda c: c.num_moe_experts is None and any(getattr(c, name) for name in _NEEDS_EXPERTS),
        "num_moe_experts must be set where a mixture-of-experts field is (" + ", ".join(_NEEDS_EXPERTS) + "), got None",
    ),
    (
        lambda c: c.num_moe_experts is not None and not 1 <= c.moe_router_topk <= c.num_moe_experts,
        "moe_router_topk must be from 1 to num_moe_experts ({num_moe_experts}), got {moe_router_topk}",
    ),
    (
        lambda c: (
            c.num_moe_experts is not None
            and c.moe_router_topk == 1
            and c.moe_router_score_function == "softmax"
            and not c.moe_router_pre_softmax
        ),
        "moe_router_topk=1 must go with moe_router_pre_softmax, got False: a softmax over the one expert that is taken is"
        " 1 whatever the router says",
    ),
    (
        lambda c: c.moe_router_score_function not in SCORE_FUNCTIONS,
        "moe_router_score_function must be 'softmax' or 'sigmoid', got {moe_router_score_function!r}",
    ),
    (
        lambda c: c.moe_router_pre_softmax and c.moe_router_score_function != "softmax",
        "moe_router_pre_softmax must go with moe_router_score_function='softmax', got {moe_router_score_function!r}",
    ),
    (
        lambda c: c.moe_router_load_balancing_type not in BALANCING_TYPES,
        "moe_router_load_balancing_type must be 'aux_loss', 'seq_aux_loss' or 'none', got"
        " {moe_router_load_balancing_type!r}",
    ),
    (
        lambda c: c.moe_router_load_balancing_type == "none" and c.moe_aux_loss_coeff != 0.0,
        "moe_aux_loss_coeff must be 0 with moe_router_load_balancing_type='none', got {moe_aux_loss_coeff}",
    ),
    (
        lambda c: c.moe_router_dtype not in (None, "fp32", "fp64"),
        "moe_router_dtype must be 'fp32', 'fp64' or None, got {moe_router_dtype!r}",
    ),
    (
        lambda c: c.moe_expert_capacity_factor is not None and c.moe_expert_capacity_factor <= 0.0,
        "moe_expert_capacity_factor must be positive (or None to drop nothing), got {moe_expert_capacity_factor}",
    ),
    (
        lambda c: c.moe_pad_expert_input_to_capacity and c.moe_expert_capacity_factor is None,
        "moe_pad_expert_input_to_capacity must go with moe_expert_capacity_factor, got None",
    ),
    (
        lambda c: c.moe_token_drop_policy not in DROP_POLICIES,
        "moe_token_drop_policy must be 'probs' or 'position', got {moe_token_drop_policy!r}",
    ),
    (
        lambda c: not isinstance(c.moe_layer_freq, int) and len(c.moe_layer_freq) != c.num_layers,
        "moe_layer_freq must be a number or one for each of num_layers ({num_layers}), got {moe_layer_freq}",
    ),
    (
        lambda c: isinstance(c.moe_layer_freq, int) and c.moe_layer_freq < 1,
        "moe_layer_freq must be at least 1, got {moe_layer_freq}",
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
        lambda c: c.moe_token_dispatcher_type not in ("alltoall", "allgather"),
        "moe_token_dispatcher_type must be 'alltoall', got {moe_token_dispatcher_type!r}",
    ),
]
