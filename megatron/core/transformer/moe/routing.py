"""Which experts a token goes to, and with what weight: the router's arithmetic on logits.

Shapes: t tokens, e experts, k experts of a token (topk).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


class Routing(NamedTuple):
    """Where tokens go; choice ``j`` of token ``i`` is assignment ``i * k + j``."""

    probs: torch.Tensor
    """[t, k] factor of the expert's output, differentiable."""
    experts: torch.Tensor
    """[t, k] number of the expert, int64."""


def route(logits: torch.Tensor, config: TransformerConfig) -> Routing:
    """Each token goes to its ``moe_router_topk`` best experts; scores are computed in fp32 at least.

    Args:
        logits: [t, e] in any float dtype, which is that of ``probs`` as well.

    Source: Megatron-Core's topk_routing_with_score_function (what is computed, and in which dtype).
    """
    topk, wide = config.moe_router_topk, _wide(logits)
    if config.moe_router_score_function == "sigmoid":
        scores, experts = torch.topk(torch.sigmoid(wide), topk, dim=1)
        probs = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20) if topk > 1 else scores
    elif config.moe_router_pre_softmax:
        probs, experts = torch.topk(torch.softmax(wide, dim=-1), topk, dim=1)
    else:
        best, experts = torch.topk(wide, topk, dim=1)
        probs = torch.softmax(best, dim=-1)
    if config.moe_router_topk_scaling_factor:
        probs = probs * config.moe_router_topk_scaling_factor
    return Routing(probs.type_as(logits), experts)


def scores_of_all(logits: torch.Tensor, score_function: str) -> torch.Tensor:
    """[t, e] of [t, e]: scores that add up to 1 over the experts, which the load-balancing loss weighs."""
    wide = _wide(logits)
    if score_function == "softmax":
        return torch.softmax(wide, dim=-1)
    scores = torch.sigmoid(wide)
    return scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)


def capacity(num_tokens: int, config: TransformerConfig) -> int | None:
    """Assignments that each expert takes of a rank's microbatch of ``num_tokens``; None: all.

    Source: GShard (arXiv:2006.16668) section 2.2; counted on each rank alone, as in Megatron-Core.
    """
    if config.moe_expert_capacity_factor is None:
        return None
    assert config.num_moe_experts, "checked by the configuration"
    fair = num_tokens * config.moe_router_topk / config.num_moe_experts
    # A token goes to an expert once at most.
    return min(math.ceil(fair * config.moe_expert_capacity_factor), num_tokens)


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype is torch.float64 else logits.float()
