"""The router's arithmetic: which experts a token goes to and with what weight, as one autograd node.

[Note: a router's operations] Logits are small, so a router costs the device next to nothing, and the host one launch for
each operation. Hence everything after the choice of experts, auxiliary losses included, is one function in forward and one
in backward, compiled where there is a compiler. Backward recomputes scores from logits instead of keeping them.

Shapes: t tokens, h hidden size, e experts, k experts of a token (topk), q sequences (1 where experts are balanced over all
tokens; tokens are [t / q, q]).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F

from megatron.core.jit import Fusible

if TYPE_CHECKING:
    from megatron.core.transformer.moe.auxiliary_losses import AuxiliaryLosses
    from megatron.core.transformer.moe.router_replay import RouterReplay
    from megatron.core.transformer.transformer_config import TransformerConfig

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
# Scores of each expert by itself, which are normalised over the chosen ones.
_NORMALISED_LATER = ("sigmoid", "sqrtsoftplus")
SCORES = ("softmax", *_NORMALISED_LATER)
"""What ``moe_router_score_function`` may be."""
# Keeps a sum of these above zero; the value is Megatron-Core's.
_TINY = 1e-20
_SMALL = 1e-8


class Routing(NamedTuple):
    """The experts of each token; choice ``j`` of token ``i`` is assignment ``i * k + j``."""

    probs: torch.Tensor
    """[t, k] factor of the expert's output, differentiable."""
    experts: torch.Tensor
    """[t, k] index of the expert, int64."""


class RoutingWithLosses(NamedTuple):
    """A routing with this rank's parts of the auxiliary losses [], without coefficients."""

    routing: Routing
    balancing: tuple[torch.Tensor, ...]
    """Of the load-balancing losses, in the order of ``AuxiliaryLosses.balancing``."""
    z_loss: torch.Tensor | None
    """None: there is none."""


def route(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    config: TransformerConfig,
    losses: AuxiliaryLosses | None = None,
    *,
    bias: torch.Tensor | None = None,
    expert_bias: torch.Tensor | None = None,
    training: bool = False,
    replay: RouterReplay | None = None,
) -> RoutingWithLosses:
    """Choose the ``moe_router_topk`` best experts of each of [..., h] tokens by the logits of an [e, h] weight.

    In ``training`` with "sinkhorn", the best are those of the matrix that ``sinkhorn`` balances.

    Args:
        bias: [e] of the logits, learned; None: none.
        expert_bias: [e] added to the scores where experts are chosen, and nowhere else; None: none.
        replay: records the choice, or makes it; None: neither.

    Logits are in ``moe_router_dtype``, and so are ``probs``; scores are computed in fp32 at least. Backward adds the
    gradients of the losses to whatever reaches ``probs``.

    Ranks: all of ``losses.group``, which sums one small tensor of counts, where experts are balanced.
    Source: Megatron-Core's topk_routing_with_score_function (what is computed, and in which dtype).
    """
    arguments = (hidden_states, weight, bias, config, losses, expert_bias, training, replay)
    probs, experts, z_loss, *balancing = _Route.apply(*arguments)  # type: ignore[no-untyped-call, unused-ignore]
    return RoutingWithLosses(Routing(probs, experts), tuple(balancing), z_loss)


def logits_of(
    tokens: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config: TransformerConfig
) -> torch.Tensor:
    """Compute logits in ``moe_router_dtype``: [..., h] -> [..., e]."""
    dtype = _DTYPES.get(config.moe_router_dtype or "", tokens.dtype)
    return F.linear(tokens.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def capacity(num_tokens: int, config: TransformerConfig) -> int | None:
    """Return how many assignments an expert takes from a rank's microbatch of ``num_tokens``; None: all of them.

    Source: GShard (arXiv:2006.16668) section 2.2; counted on each rank alone, as in Megatron-Core.
    """
    if config.moe_expert_capacity_factor is None:
        return None
    assert config.num_moe_experts, "checked by the configuration"
    return capacity_of(num_tokens, config.moe_router_topk, config.num_moe_experts, config.moe_expert_capacity_factor)


def capacity_of(num_tokens: int, topk: int, num_experts: int, factor: float) -> int:
    """Return the capacity of an expert: ``factor`` times its fair share of the assignments of ``num_tokens``."""
    # A token goes to an expert at most once.
    return min(math.ceil(num_tokens * topk / num_experts * factor), num_tokens)


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        config: TransformerConfig,
        losses: AuxiliaryLosses | None,
        expert_bias: torch.Tensor | None,
        training: bool,
        replay: RouterReplay | None,
    ) -> tuple[torch.Tensor | None, ...]:
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = logits_of(tokens, weight, bias, config)
        if config.moe_router_force_load_balancing:
            logits = torch.randn_like(logits)  # backward treats them as the logits
        ctx.scores, ctx.scaling = _scores(config), config.moe_router_topk_scaling_factor or 1.0
        ctx.compiled = not config.disable_jit_fuser
        scored = score(logits, ctx.scores)
        best, experts = _choose(logits, scored, config, expert_bias, balances=training, replay=replay)
        if losses is None:
            probs = _weigh(ctx.compiled, logits, best, ctx.scores, ctx.scaling)
            balancing: tuple[torch.Tensor, ...] = ()
            grad_sums = grad_log_sums = z_loss = None
        else:
            preferred = _preferred(scored, experts, config, replay) if losses.balancing else experts
            probs, summed, counts, log_sums, z_loss = _weigh_with_losses(
                ctx.compiled, logits, best, preferred, ctx.scores, ctx.scaling, losses.num_sequences
            )
            balancing, grad_sums = losses.balance(summed, counts, config.moe_router_topk, logits.shape[0])
            z_loss, grad_log_sums = losses.restrain(z_loss, log_sums)
        # Not saved: where backward computes the router again, more microbatches have been counted for the global loss.
        ctx.grad_sums = grad_sums
        ctx.save_for_backward(hidden_states, weight, logits, best, experts, grad_log_sums)
        ctx.mark_non_differentiable(*(x for x in (experts, z_loss, *balancing) if x is not None))
        ctx.set_materialize_grads(False)  # only probs has a gradient; zeros for the other outputs would go unused
        return probs, experts, z_loss, *balancing

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_states, weight, logits, best, experts, grad_log_sums = ctx.saved_tensors
        gradients = (ctx.grad_sums, grad_log_sums)
        grad = _gradient(ctx.compiled, logits, grads[0], best, experts, *gradients, ctx.scores, ctx.scaling)
        grad_hidden = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_hidden = (grad @ weight.to(grad.dtype)).to(hidden_states.dtype).view(hidden_states.shape)
        if ctx.needs_input_grad[1]:
            tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
            grad_weight = (grad.t() @ tokens.to(grad.dtype)).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.sum(0).to(weight.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None


def _choose(
    logits: torch.Tensor,
    scored: torch.Tensor,
    config: TransformerConfig,
    expert_bias: torch.Tensor | None,
    *,
    balances: bool,
    replay: RouterReplay | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores [t, k] of the experts that tokens go to, and their indices [t, k]."""
    topk, preferred = config.moe_router_topk, scored
    if balances and config.moe_router_load_balancing_type == "sinkhorn":
        preferred = sinkhorn(_wide(logits))
    if expert_bias is not None:
        preferred = preferred + expert_bias
    groups = (config.moe_router_num_groups, config.moe_router_group_topk)
    if replay is None:
        best, experts = choose_experts(preferred, topk, *groups)
    else:
        best, experts = replay.get_replay_topk(preferred, topk, *groups, default_compute_topk=choose_experts)
    return best if preferred is scored else scored.gather(1, experts), experts


def choose_experts(
    scores: torch.Tensor, topk: int, num_groups: int | None = None, group_topk: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the best scores of each token and their experts, [t, k] each; of its best groups alone where there are groups."""
    if num_groups is not None and group_topk is not None:
        scores = of_best_groups(scores, num_groups, group_topk, topk)
    best, experts = torch.topk(scores, topk, dim=1)
    return best, experts


def _preferred(
    scored: torch.Tensor, experts: torch.Tensor, config: TransformerConfig, replay: RouterReplay | None
) -> torch.Tensor:
    """Return the experts [t, k] with the best scores, which the load-balancing loss counts.

    They differ from those that the tokens go to where a bias, the limit to some groups or a replay has a say in these.

    Source: DeepSeek-V3 (arXiv:2412.19437) equation 18, Megatron-Core's compute_routing_scores_for_aux_loss.
    """
    if not config.moe_router_enable_expert_bias and config.moe_router_group_topk is None and replay is None:
        return experts
    return torch.topk(scored, config.moe_router_topk, dim=1).indices


def of_best_groups(scored: torch.Tensor, num_groups: int, group_topk: int, topk: int) -> torch.Tensor:
    """Replace the scores [t, e] of experts outside of a token's ``group_topk`` best groups by minus infinity.

    A group is e / ``num_groups`` neighbouring experts. The best groups have the largest sums of their topk / group_topk best
    scores.

    Source: DeepSeek-V3 (arXiv:2412.19437) section 2.1.2 (node-limited routing); Megatron-Core's group_limited_topk.
    """
    grouped = scored.view(scored.shape[0], num_groups, -1)
    group_scores = grouped.topk(topk // group_topk, dim=-1).values.sum(dim=-1)
    best = group_scores.topk(group_topk, dim=-1, sorted=False).indices
    is_out = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, best, False)
    return grouped.masked_fill(is_out.unsqueeze(-1), float("-inf")).view_as(scored)


def sinkhorn(logits: torch.Tensor, tolerance: float = 1e-4) -> torch.Tensor:
    """Scale rows and columns of exp(logits) in turn until columns, the experts of [t, e], have equal sums.

    The tokens are those of this rank, as in Megatron-Core. The host waits for the device in each turn.

    Source: Sinkhorn-Knopp; S-BASE (arXiv:2202.01169) for the choice of experts; steps and tolerance are Megatron-Core's.
    """
    num_tokens, num_experts = logits.shape
    matrix = logits.exp()
    columns = torch.ones_like(matrix[0])
    while True:
        before = columns
        rows = 1 / (num_tokens * ((matrix * columns).sum(dim=1) + _SMALL))
        columns = 1 / (num_experts * ((matrix * rows.unsqueeze(1)).sum(dim=0) + _SMALL))
        # Not "> tolerance": what is not finite ends the loop too.
        if not (columns - before).abs().mean() > tolerance:
            return matrix * columns * rows.unsqueeze(1)


def _scores(config: TransformerConfig) -> str:
    """Name the scores that choose experts: logits (then a softmax over the chosen), softmax over all, or what normalises later."""
    if config.moe_router_load_balancing_type == "sinkhorn":
        return "sigmoid" if config.moe_router_topk == 1 else "softmax"
    if config.moe_router_score_function in _NORMALISED_LATER:
        return config.moe_router_score_function
    return "softmax" if config.moe_router_pre_softmax else "logits"


def score(logits: torch.Tensor, scores: str) -> torch.Tensor:
    """Turn [t, e] logits into the scores that choose experts: "logits", "softmax" or what normalises later."""
    if scores in _NORMALISED_LATER:
        return _unnormalised(_wide(logits), scores)
    return torch.softmax(_wide(logits), dim=-1) if scores == "softmax" else _wide(logits)


def probs_of(best: torch.Tensor, scores: str) -> torch.Tensor:
    """Compute the [t, k] factors, before scaling, from the best scores [t, k]."""
    if scores == "logits":
        return torch.softmax(best, dim=-1)
    return _normalised(best) if scores in _NORMALISED_LATER and best.shape[1] > 1 else best


@Fusible
def _weigh(logits: torch.Tensor, best: torch.Tensor, scores: str, scaling: float) -> torch.Tensor:
    return (probs_of(best, scores) * scaling).to(logits.dtype)


@Fusible
def _weigh_with_losses(
    logits: torch.Tensor, best: torch.Tensor, experts: torch.Tensor, scores: str, scaling: float, num_sequences: int
) -> tuple[torch.Tensor, ...]:
    """Compute what ``_weigh`` does and what the losses need.

    Returns:
        Factors [t, k]; sums over the tokens of each sequence of scores and of assignments, [q * e] each; log-sum-exps [t]
        of the logits and the mean [] of their squares.
    """
    num_experts, wide = logits.shape[1], _wide(logits)
    summed = balanced_scores(wide, scores).view(-1, num_sequences, num_experts).sum(dim=0)
    # Sums of ones are exact in any order.
    taken = _is_taken(experts, num_experts).to(wide.dtype).sum(dim=1)
    counts = taken.view(-1, num_sequences, num_experts).sum(dim=0)
    log_sums = torch.logsumexp(wide, dim=-1)
    probs = (probs_of(best, scores) * scaling).to(logits.dtype)
    return probs, summed.view(-1), counts.view(-1), log_sums, log_sums.square().mean()


@Fusible
def _gradient(
    logits: torch.Tensor,
    grad_probs: torch.Tensor,
    best: torch.Tensor,
    experts: torch.Tensor,
    grad_sums: torch.Tensor | None,
    grad_log_sums: torch.Tensor | None,
    scores: str,
    scaling: float,
) -> torch.Tensor:
    """Compute the [t, e] gradient of the logits from the gradients of factors and losses.

    ``grad_sums`` [q * e] is the load-balancing loss's gradient of the summed scores, ``grad_log_sums`` [t] the z-loss's
    gradient of the log-sum-exps; None where there is no such loss.
    """
    num_tokens, num_experts = logits.shape
    wide = _wide(logits)
    grad_best = grad_probs.to(wide.dtype) * scaling
    if scores == "logits":
        grad_best = _softmax_gradient(grad_best, torch.softmax(best, dim=-1))
    elif scores in _NORMALISED_LATER and best.shape[1] > 1:
        grad_best = _normalised_gradient(grad_best, best)
    grad = torch.where(_is_taken(experts, num_experts), grad_best.unsqueeze(2), 0.0).sum(dim=1)
    if scores == "softmax":
        grad = _softmax_gradient(grad, torch.softmax(wide, dim=-1))
    elif scores in _NORMALISED_LATER:
        grad = _unnormalised_gradient(grad, wide, scores)
    if grad_sums is not None:
        sequences = grad_sums.view(1, -1, num_experts)
        expanded = sequences.expand(num_tokens // sequences.shape[1], -1, -1).reshape(num_tokens, num_experts)
        if scores in _NORMALISED_LATER:
            grad_scores = _normalised_gradient(expanded, _unnormalised(wide, scores))
            grad = grad + _unnormalised_gradient(grad_scores, wide, scores)
        else:
            grad = grad + _softmax_gradient(expanded, torch.softmax(wide, dim=-1))
    if grad_log_sums is not None:
        grad = grad + grad_log_sums.unsqueeze(1) * torch.softmax(wide, dim=-1)
    return grad.to(logits.dtype)


def balanced_scores(logits: torch.Tensor, scores: str) -> torch.Tensor:
    """Turn [t, e] logits into the scores that the load-balancing loss uses; they add up to 1 over the experts."""
    wide = _wide(logits)
    if scores in _NORMALISED_LATER:
        return _normalised(_unnormalised(wide, scores))
    return torch.softmax(wide, dim=-1)


def _is_taken(experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Compare choices with experts: [t, k, e], True where choice k of token t is expert e."""
    return experts.unsqueeze(2) == torch.arange(num_experts, device=experts.device)


def _softmax_gradient(grad: torch.Tensor, softmax: torch.Tensor) -> torch.Tensor:
    product = grad * softmax
    return product - softmax * product.sum(dim=-1, keepdim=True)


def _unnormalised(wide: torch.Tensor, scores: str) -> torch.Tensor:
    return torch.sigmoid(wide) if scores == "sigmoid" else F.softplus(wide).sqrt()


def _unnormalised_gradient(grad: torch.Tensor, wide: torch.Tensor, scores: str) -> torch.Tensor:
    sigmoid = torch.sigmoid(wide)
    if scores == "sigmoid":
        return grad * sigmoid * (1 - sigmoid)
    # Where softplus is zero in this dtype, its root's slope is too.
    return grad * sigmoid / (2 * F.softplus(wide).sqrt()).clamp(min=_TINY)


def _normalised(scores: torch.Tensor) -> torch.Tensor:
    return scores / (scores.sum(dim=-1, keepdim=True) + _TINY)


def _normalised_gradient(grad: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    total = scores.sum(dim=-1, keepdim=True) + _TINY
    return (grad - (grad * scores).sum(dim=-1, keepdim=True) / total) / total


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype is torch.float64 else logits.float()
