"""A router written down once more with autograd alone: what the fused one is compared with.

Shapes: t tokens, e experts, k experts of a token.
"""

from __future__ import annotations

from typing import Any

import torch


def scores_of_all(logits: torch.Tensor, score_function: str) -> torch.Tensor:
    """[t, e] of [t, e]: scores that add up to 1 over the experts, which the load-balancing loss weighs."""
    if score_function == "softmax":
        return torch.softmax(logits, dim=-1)
    scores = torch.sigmoid(logits)
    return scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)


def routed(logits: torch.Tensor, config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and experts, [t, k], of [t, e] logits."""
    topk = config.moe_router_topk
    if config.moe_router_load_balancing_type == "sinkhorn":
        experts = torch.topk(balanced_by_turns(logits.detach()), topk, dim=1)[1]
        scores = torch.sigmoid(logits) if topk == 1 else torch.softmax(logits, dim=-1)
        return scores.gather(1, experts), experts
    if config.moe_router_score_function == "sigmoid":
        best, experts = torch.topk(torch.sigmoid(logits), topk, dim=1)
        probs = best / (best.sum(dim=-1, keepdim=True) + 1e-20) if topk > 1 else best
    elif config.moe_router_pre_softmax:
        probs, experts = torch.topk(torch.softmax(logits, dim=-1), topk, dim=1)
    else:
        best, experts = torch.topk(logits, topk, dim=1)
        probs = torch.softmax(best, dim=-1)
    return probs * (config.moe_router_topk_scaling_factor or 1.0), experts


def load_balancing_loss(scores: torch.Tensor, experts: torch.Tensor, num_sequences: int = 1) -> torch.Tensor:
    """[] of [t, e] scores and [t, k] experts; the mean over sequences, whose tokens are ``num_sequences`` rows apart."""
    losses = []
    for index in range(num_sequences):
        own, taken = scores[index::num_sequences], experts[index::num_sequences]
        shares = torch.bincount(taken.flatten(), minlength=own.shape[1]) / taken.numel()
        losses.append(own.shape[1] * (shares * own.mean(dim=0)).sum())
    return torch.stack(losses).mean()


def z_loss(logits: torch.Tensor) -> torch.Tensor:
    """[] of [t, e] logits."""
    return logits.exp().sum(dim=-1).log().square().mean()


def balanced_by_turns(logits: torch.Tensor) -> torch.Tensor:
    """[t, e] of [t, e]: exponentials whose rows and then columns are divided by their sums until columns hardly change."""
    matrix = logits.exp()
    columns_before = torch.full_like(matrix[0], torch.inf)
    columns = torch.ones_like(matrix[0])
    while (columns - columns_before).abs().mean() > 1e-4:
        rows = 1 / (matrix * columns).sum(dim=1) / len(matrix)
        columns_before, columns = columns, 1 / (matrix * rows[:, None]).sum(dim=0) / len(columns)
    return matrix * rows[:, None] * columns
