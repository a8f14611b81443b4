"""Functions of routing and dispatch by Megatron-Core's names and signatures, for callers; our layers use ``routing.py``.

Shapes: t tokens, h hidden size, e experts, k experts of a token. A routing map [t, e] is True where a token goes to an expert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.transformer.moe.routing import SCORES, balanced_scores, capacity_of, choose_experts, probs_of, score

if TYPE_CHECKING:
    from megatron.core.transformer.moe.router_replay import RouterReplay


def group_limited_topk(
    scores: torch.Tensor, topk: int, num_tokens: int, num_experts: int, num_groups: int, group_topk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the best experts of each token's best groups by scores [t, e].

    Returns:
        The scores of the chosen experts, and these, [t, k] each.
    """
    return choose_experts(scores.view(num_tokens, num_experts), topk, num_groups, group_topk)


def topk_routing_with_score_function(
    logits: torch.Tensor,
    topk: int,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    score_function: str = "softmax",
    expert_bias: torch.Tensor | None = None,
    fused: bool = False,
    router_replay: RouterReplay | None = None,
    dense_output: bool = False,
    precomputed_indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts of each token by logits [t, e]; differentiable.

    Args:
        expert_bias: [e] added to the scores where experts are chosen, and nowhere else.
        fused: accepted; the numbers are the same.
        router_replay: records the choice, or makes it.
        dense_output: return factors and experts as [t, k].
        precomputed_indices: [t, k] experts to take, instead of choosing any.

    Returns:
        The factors of the experts' outputs and the routing map, [t, e] each.

    Raises:
        ValueError: the score function is not known.
    """
    kind = _kind(score_function) if score_function != "softmax" or use_pre_softmax else "logits"
    scored = score(logits, kind)
    preferred = scored if expert_bias is None else scored + expert_bias
    if precomputed_indices is not None:
        experts = precomputed_indices
    else:
        choose = choose_experts if router_replay is None else router_replay.get_replay_topk
        further = {} if router_replay is None else {"default_compute_topk": choose_experts}
        experts = choose(preferred, topk, num_groups, group_topk, **further)[1]
    probs = (probs_of(scored.gather(1, experts), kind) * (scaling_factor or 1.0)).type_as(logits)
    if dense_output:
        return probs, experts
    return torch.zeros_like(logits).scatter(1, experts, probs), _map_of(experts, logits)


def compute_routing_scores_for_aux_loss(
    logits: torch.Tensor,
    topk: int,
    score_function: str,
    fused: bool = False,
    padding_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the routing map and the scores [t, e] by which load-balancing losses count.

    Args:
        fused: accepted; the numbers are the same.
        padding_mask: [t] True where a token does not count.

    Raises:
        ValueError: the score function is not known.
    """
    scores = balanced_scores(logits, _kind(score_function))
    routing_map = _map_of(scores.topk(topk, dim=1).indices, logits)
    if padding_mask is None:
        return routing_map, scores
    counts = ~padding_mask.unsqueeze(-1)
    return routing_map & counts, scores * counts


def apply_router_token_dropping(
    routing_probs: torch.Tensor,
    routing_map: torch.Tensor,
    router_topk: int,
    capacity_factor: float,
    drop_policy: str = "probs",
    pad_to_capacity: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Drop assignments [t, e] above the capacity of experts, the least probable or the last ones.

    Args:
        pad_to_capacity: fill experts below their capacity with tokens that did not choose them, whose factors are 0.

    Returns:
        The remaining factors and routing map.

    Raises:
        ValueError: the policy is not known.
    """
    num_tokens, num_experts = routing_probs.shape
    if drop_policy not in ("probs", "position"):
        raise ValueError(f"drop_policy must be 'probs' or 'position', got {drop_policy!r}")
    limit = capacity_of(num_tokens, router_topk, num_experts, capacity_factor)
    preferred = routing_probs.detach() if drop_policy == "probs" else routing_map.int()
    order = preferred.sort(dim=0, descending=True, stable=True).indices
    kept = torch.zeros_like(routing_map).scatter(0, order[:limit], True)
    taken = kept if pad_to_capacity else routing_map & kept
    return routing_probs * taken, taken


def sort_chunks_by_idxs(
    input: torch.Tensor,
    split_sizes: torch.Tensor,
    sorted_idxs: torch.Tensor,
    probs: torch.Tensor | None = None,
    fused: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Reorder the chunks of rows of these sizes to ``sorted_idxs``; the host waits for the device.

    Args:
        probs: further rows that are reordered likewise.
        fused: accepted; the result is the same.
    """

    def reordered(rows: torch.Tensor) -> torch.Tensor:
        chunks = rows.split(split_sizes.tolist())
        return torch.cat([chunks[index] for index in sorted_idxs.tolist()])

    return reordered(input), None if probs is None else reordered(probs)


def apply_random_logits(logits: torch.Tensor) -> torch.Tensor:
    """Return normal random numbers, other ones on each expert-parallel rank, whose gradient is that of the logits."""
    with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
        return torch.randn_like(logits) + (logits - logits.detach())


class RouterGatingLinearFunction(torch.autograd.Function):
    """A linear layer computed in another dtype than its input's and weight's, which alone are kept for backward."""

    @staticmethod
    def forward(
        ctx: Any,
        inp: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        router_dtype: torch.dtype,
    ) -> torch.Tensor:
        """Compute [..., h] -> [..., e] in ``router_dtype``."""
        ctx.save_for_backward(inp, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return torch.nn.functional.linear(
            inp.to(router_dtype), weight.to(router_dtype), None if bias is None else bias.to(router_dtype)
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of input, weight and bias, in their dtypes."""
        inp, weight = ctx.saved_tensors
        grad = grads[0].flatten(0, -2)
        grad_inp = (grad @ weight.to(grad.dtype)).view_as(inp).to(inp.dtype)
        grad_weight = (grad.t() @ inp.flatten(0, -2).to(grad.dtype)).to(weight.dtype)
        return grad_inp, grad_weight, None if ctx.bias_dtype is None else grad.sum(0).to(ctx.bias_dtype), None


def router_gating_linear(
    inp: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, router_dtype: torch.dtype
) -> torch.Tensor:
    """Compute [..., h] -> [..., e] in ``router_dtype``; see ``RouterGatingLinearFunction``."""
    output: torch.Tensor = RouterGatingLinearFunction.apply(inp, weight, bias, router_dtype)  # type: ignore[no-untyped-call, unused-ignore]
    return output


def get_default_pg_collection() -> ProcessGroupCollection:
    """Return the groups of a mixture of experts that ``initialize_model_parallel`` built."""
    names = ("tp", "cp", "ep", "expt_tp", "expt_dp", "tp_ep", "tp_cp", "tp_dp_cp")
    return ProcessGroupCollection(**{name: parallel_state.group_named(name) for name in names})


def _kind(score_function: str) -> str:
    if score_function not in SCORES:
        raise ValueError(f"score_function must be one of {SCORES}, got {score_function!r}")
    return score_function


def _map_of(experts: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, True)
