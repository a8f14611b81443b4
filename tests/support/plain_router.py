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
    scores = _score_of_each(logits, score_function)
    return scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)


def _score_of_each(logits: torch.Tensor, score_function: str) -> torch.Tensor:
    return torch.sigmoid(logits) if score_function == "sigmoid" else torch.log1p(logits.exp()).sqrt()


def routed(
    logits: torch.Tensor, config: Any, expert_bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and experts, [t, k], of [t, e] logits."""
    topk = config.moe_router_topk
    if config.moe_router_load_balancing_type == "sinkhorn":
        experts = torch.topk(balanced_by_turns(logits.detach()), topk, dim=1)[1]
        scores = torch.sigmoid(logits) if topk == 1 else torch.softmax(logits, dim=-1)
        return scores.gather(1, experts), experts
    if config.moe_router_score_function != "softmax":
        scores = _score_of_each(logits, config.moe_router_score_function)
    else:
        scores = torch.softmax(logits, dim=-1) if config.moe_router_pre_softmax else logits
    preferred = scores.detach() if expert_bias is None else scores.detach() + expert_bias
    if config.moe_router_num_groups is not None:
        preferred = _best_groups_alone(preferred, config.moe_router_num_groups, config.moe_router_group_topk, topk)
    experts = torch.topk(preferred, topk, dim=1)[1]
    probs = scores.gather(1, experts)
    if config.moe_router_score_function == "softmax" and not config.moe_router_pre_softmax:
        probs = torch.softmax(probs, dim=-1)
    elif config.moe_router_score_function != "softmax" and topk > 1:
        probs = probs / (probs.sum(dim=-1, keepdim=True) + 1e-20)
    return probs * (config.moe_router_topk_scaling_factor or 1.0), experts


def _best_groups_alone(preferred: torch.Tensor, num_groups: int, group_topk: int, topk: int) -> torch.Tensor:
    """[t, e] of [t, e]: token by token, minus infinity outside of the groups with the best experts."""
    size, kept = preferred.shape[1] // num_groups, torch.full_like(preferred, -torch.inf)
    for token, own in enumerate(preferred.tolist()):
        groups = [own[start : start + size] for start in range(0, len(own), size)]
        totals = [sum(sorted(group, reverse=True)[: topk // group_topk]) for group in groups]
        for group in sorted(range(num_groups), key=totals.__getitem__, reverse=True)[:group_topk]:
            members = slice(group * size, (group + 1) * size)
            kept[token, members] = preferred[token, members]
    return kept


def updated_bias(bias: torch.Tensor, experts: torch.Tensor, rate: float) -> torch.Tensor:
    """[e] of [e] and of all experts [...] that a step's tokens went to."""
    counts = torch.bincount(experts.flatten(), minlength=len(bias))
    return bias + rate * torch.tensor(
        [float(mine < experts.numel() / len(bias)) - float(mine > experts.numel() / len(bias)) for mine in counts]
    )


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
