"""A mixture-of-experts GPT in float64 from the formulas of papers and PyTorch alone, trained on whole batches in one process.

Routers' losses are those of their papers, over choices of k experts for each token:

- "aux_loss": Switch Transformer (arXiv:2101.03961) equations 4 to 6, over the tokens of a microbatch.
- "seq_aux_loss": DeepSeek-V3 (arXiv:2412.19437) equations 17 to 20, over those of each sequence; the mean over the sequences.
- "global_aux_loss": "Demons in the Detail" (arXiv:2501.11873) equation 4: shares of assignments are those of all data-parallel ranks and of
  the microbatches of the step so far. It weighs 1 / data-parallel ranks, as in Megatron-Core.
- z: ST-MoE (arXiv:2202.08906) equation 5, over the tokens of a microbatch.

Shapes: m microbatches, d data-parallel ranks, b sequences, s tokens of a sequence, t = b * s, h hidden size, n heads, e experts, k experts of a
token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

NUM_LAYERS, NUM_HEADS, NUM_EXPERTS, TOPK = 2, 4, 4, 2
_EPSILON = 1e-5
_TIE = 1e-5


@dataclass(frozen=True)
class Routing:
    """How tokens are routed, and with which losses."""

    losses: Mapping[str, float]
    """Coefficients by kind, in the order of the command line."""
    z: float = 0.0
    sigmoid: bool = False
    """Scores of each expert by itself, with a bias of the experts that follows their load."""
    groups: int = 1
    """Of neighbouring experts, of which a token uses the one with the best scores."""
    scaling: float = 1.0
    bias_rate: float = 0.05
    capacity: float | None = None
    """Of an expert, in multiples of the mean of a microbatch's tokens; the least probable assignments above it are dropped."""


@dataclass
class Trained:
    """What some steps led to."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    auxiliary: list[list[float]] = field(default_factory=list)
    """[steps] losses of routers without coefficients, means over layers, microbatches and data-parallel ranks."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    biases: list[Tensor] = field(default_factory=list)
    """[NUM_LAYERS] of the experts."""


def train(initial: Mapping[str, Tensor], steps: Sequence[Tensor], routing: Routing, lr: float) -> Trained:
    """Train by plain gradient descent.

    Args:
        initial: weights by Megatron-Core's names.
        steps: [m, d, b, s + 1] tokens of each.
    """
    weights = {name: value.double().clone().requires_grad_() for name, value in initial.items()}
    result = Trained(weights=weights, biases=[torch.zeros(NUM_EXPERTS, dtype=torch.float64) for _ in range(NUM_LAYERS)])
    for tokens in steps:
        _step(result, tokens, routing, lr)
    result.weights = {name: value.detach() for name, value in weights.items()}
    return result


def _step(result: Trained, tokens: Tensor, routing: Routing, lr: float) -> None:
    num_microbatches, num_ranks = tokens.shape[:2]
    main = torch.zeros((), dtype=torch.float64)
    logged = {kind: torch.zeros((), dtype=torch.float64) for kind in (*routing.losses, *["z"] * bool(routing.z))}
    assigned = torch.zeros(NUM_LAYERS, NUM_EXPERTS, dtype=torch.float64)  # of the step so far, for the expert bias
    preferred_so_far = torch.zeros(NUM_LAYERS, NUM_EXPERTS, dtype=torch.float64)
    for number, microbatch in enumerate(tokens, start=1):
        passes = [_forward(result, of_rank, routing) for of_rank in microbatch]
        main = main + torch.stack([loss for loss, _ in passes]).mean() / num_microbatches
        for layer in range(NUM_LAYERS):
            routers = [of_layers[layer] for _, of_layers in passes]
            assigned[layer] += sum(router.assigned for router in routers)
            preferred_so_far[layer] += sum(router.preferred.sum(dim=(0, 1)) for router in routers)
            shares = preferred_so_far[layer] / (number * num_ranks * routers[0].preferred[..., 0].numel() * TOPK)
            for kind in logged:
                loss = _router_loss(kind, routers, shares)
                logged[kind] = logged[kind] + loss / (num_microbatches * NUM_LAYERS)
    objective = main
    for kind, value in logged.items():
        coefficient = routing.z if kind == "z" else routing.losses[kind]
        weight = 1 / num_ranks if kind == "global_aux_loss" else 1.0
        objective = objective + coefficient * weight * value * NUM_LAYERS
    gradients = dict(zip(result.weights, torch.autograd.grad(objective, list(result.weights.values())), strict=True))
    result.losses.append(main.item())
    result.norms.append(math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values())))
    result.auxiliary.append([value.item() for value in logged.values()])
    with torch.no_grad():
        for name, gradient in gradients.items():
            result.weights[name] -= lr * gradient
    if routing.sigmoid:
        for bias, counts in zip(result.biases, assigned, strict=True):
            bias += routing.bias_rate * torch.sign(counts.mean() - counts)


@dataclass(frozen=True)
class _Routed:
    """What one router did with one data-parallel rank's microbatch."""

    scores: Tensor
    """[s, b, e], with the sum 1 over the experts."""
    preferred: Tensor
    """[s, b, e] 1 where an expert is among the k with the best scores."""
    log_sums: Tensor
    """[s, b] log-sum-exps of the logits."""
    assigned: Tensor
    """[e] assignments that were not dropped."""


def _router_loss(kind: str, routers: list[_Routed], shares_of_step: Tensor) -> Tensor:
    """[]: the mean over the data-parallel ranks; the loss of all for the global one."""
    if kind == "z":
        return torch.stack([router.log_sums.square().mean() for router in routers]).mean()
    if kind == "global_aux_loss":
        means = torch.stack([router.scores.mean(dim=(0, 1)) for router in routers]).mean(dim=0)
        return NUM_EXPERTS * (shares_of_step * means).sum()
    dims = (0,) if kind == "seq_aux_loss" else (0, 1)
    losses = [
        NUM_EXPERTS * (router.preferred.mean(dim=dims) / TOPK * router.scores.mean(dim=dims)).sum(dim=-1).mean()
        for router in routers
    ]
    return torch.stack(losses).mean()


def _forward(result: Trained, tokens: Tensor, routing: Routing) -> tuple[Tensor, list[_Routed]]:
    """The mean loss [] of [b, s + 1] tokens, and what the routers did."""
    weights, routers = result.weights, []
    x = weights["embedding.word_embeddings.weight"][tokens[:, :-1]].transpose(0, 1)
    for layer in range(NUM_LAYERS):
        own = {
            name.removeprefix(f"decoder.layers.{layer}."): value
            for name, value in weights.items()
            if name.startswith(f"decoder.layers.{layer}.")
        }
        x = x + _attention(own, _norm(x, own["input_layernorm.weight"]))
        experts, routed = _experts(own, _norm(x, own["pre_mlp_layernorm.weight"]), result.biases[layer], routing)
        x = x + experts
        routers.append(routed)
    logits = _norm(x, weights["decoder.final_layernorm.weight"]) @ weights["output_layer.weight"].t()
    return F.cross_entropy(logits.transpose(0, 1).flatten(0, 1), tokens[:, 1:].flatten()), routers


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + _EPSILON).sqrt() * weight


def _attention(own: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """[s, b, h] of [s, b, h]: queries, keys and values of each head lie together; no positions."""
    query, key, value = (x @ own["self_attention.linear_qkv.weight"].t()).unflatten(-1, (NUM_HEADS, 3, -1)).unbind(-2)
    scores = torch.einsum("sbnd,tbnd->bnst", query, key) / math.sqrt(query.shape[-1])
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    seen = scores.masked_fill(later, -torch.inf).softmax(dim=-1)
    return torch.einsum("bnst,tbnd->sbnd", seen, value).flatten(2) @ own["self_attention.linear_proj.weight"].t()


def _experts(own: Mapping[str, Tensor], x: Tensor, bias: Tensor, routing: Routing) -> tuple[Tensor, _Routed]:
    logits = x @ own["mlp.router.weight"].t()
    scores = logits.sigmoid() if routing.sigmoid else logits
    choices = _chosen(scores + bias, routing.groups)
    own_scores = scores if routing.sigmoid else scores.exp()
    probs = choices * own_scores
    probs = probs / probs.sum(dim=-1, keepdim=True) * routing.scaling
    if routing.capacity is not None:
        choices = choices * _within_capacity(probs, routing.capacity)
    total = torch.zeros_like(x)
    for expert in range(NUM_EXPERTS):
        prefix = f"mlp.experts.local_experts.{expert}"
        gate, up = (x @ own[f"{prefix}.linear_fc1.weight"].t()).chunk(2, dim=-1)
        output = (F.silu(gate) * up) @ own[f"{prefix}.linear_fc2.weight"].t()
        total = total + (choices * probs)[..., expert, None] * output
    routed = _Routed(
        scores=own_scores / own_scores.sum(dim=-1, keepdim=True),
        preferred=_chosen(scores, num_groups=1),
        log_sums=logits.exp().sum(dim=-1).log(),
        assigned=choices.sum(dim=(0, 1)),
    )
    return total, routed


def _chosen(preferred: Tensor, num_groups: int) -> Tensor:
    """[s, b, e]: 1 at the best experts, of the group with the best sum of as many.

    Raises:
        AssertionError: two experts or groups are so near to each other that fp32 may choose otherwise; change the data.
    """
    preferred = preferred.detach()
    if num_groups > 1:
        grouped = preferred.unflatten(-1, (num_groups, -1))
        sums = grouped.topk(TOPK, dim=-1).values.sum(dim=-1)
        assert _margin(sums, 1) > _TIE
        is_best = sums == sums.amax(dim=-1, keepdim=True)
        preferred = grouped.masked_fill(~is_best.unsqueeze(-1), -torch.inf).flatten(-2)
    assert _margin(preferred, TOPK) > _TIE
    return torch.zeros_like(preferred).scatter_(-1, preferred.topk(TOPK, dim=-1).indices, 1.0)


def _within_capacity(probs: Tensor, factor: float) -> Tensor:
    """[s, b, e]: 1 at the most probable assignments of each expert, as many as it takes."""
    tokens = probs.detach().flatten(0, 1)
    capacity = math.ceil(len(tokens) * TOPK / NUM_EXPERTS * factor)
    best = tokens.topk(capacity, dim=0)
    assert bool((best.values[-1] - best.values).abs().sum() > 0)
    return torch.zeros_like(tokens).scatter_(0, best.indices, 1.0).view_as(probs)


def _margin(values: Tensor, number: int) -> float:
    """The least distance between the last of the ``number`` best and the next one."""
    best = values.topk(number + 1, dim=-1).values
    return float((best[..., -2] - best[..., -1]).min())
