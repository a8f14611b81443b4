"""Checks of the fields of experts and routers; ``parallel_checks`` has those of their parallel degrees."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron.core.transformer.moe.auxiliary_losses import BALANCING_LOSSES
from megatron.core.transformer.recomputation import recomputes

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

_CHOICES: dict[str, tuple[str | None, ...]] = {
    "moe_router_score_function": ("softmax", "sigmoid", "sqrtsoftplus"),
    "moe_router_dtype": (None, "fp32", "fp64"),
    "moe_token_drop_policy": ("probs", "position"),
    "moe_token_dispatcher_type": ("alltoall", "allgather", "flex"),
}


def _one_of(field: str) -> tuple[Callable[[TransformerConfig], bool], str]:
    *others, last = (repr(choice) for choice in _CHOICES[field])
    return (
        lambda c: getattr(c, field) not in _CHOICES[field],
        f"{field} must be {', '.join(others)} or {last}, got {{{field}!r}}",
    )


def _negative(number: object) -> bool:
    return not isinstance(number, int | float) or number < 0.0


def _listed(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _num_losses(value: object) -> int:
    """Return the length of a list; 0 for one value that is in no list."""
    return len(value) if isinstance(value, list | tuple) else 0


def _is_kind_of_balance(kinds: object) -> bool:
    if isinstance(kinds, list | tuple):
        return bool(kinds) and len(set(kinds)) == len(kinds) and set(kinds) <= set(BALANCING_LOSSES)
    return kinds in (*BALANCING_LOSSES, "sinkhorn", "none")


def _has_groups(config: TransformerConfig) -> bool:
    return config.moe_router_num_groups is not None and config.moe_router_group_topk is not None


def _are_uneven(config: TransformerConfig) -> bool:
    """Return whether experts, or a token's choices, cannot be divided over groups as the router needs it."""
    if not _has_groups(config) or config.num_moe_experts is None:
        return False
    groups, chosen, topk = config.moe_router_num_groups, config.moe_router_group_topk, config.moe_router_topk
    if not (groups >= 1 and 1 <= chosen <= groups and config.num_moe_experts % groups == 0):  # type: ignore[operator]
        return True
    # Enough experts in the chosen groups, and at least one counts for the score of a group.
    size = config.num_moe_experts // groups  # type: ignore[operator]
    return not 1 <= topk // chosen <= size or chosen * size < topk  # type: ignore[operator]


VALUES_OF: dict[str, Callable[[object], bool]] = {
    **{field: choices.__contains__ for field, choices in _CHOICES.items()},
    "moe_router_load_balancing_type": _is_kind_of_balance,
}
"""Fields of names, with what says whether a value is one."""

MOE_CONTRADICTIONS: list[tuple[Callable[[TransformerConfig], bool], str]] = [
    (
        lambda c: c.num_moe_experts is not None and c.num_moe_experts < 1,
        "num_moe_experts must be at least 1 (or None for a dense model), got {num_moe_experts}",
    ),
    *map(_one_of, _CHOICES),
    (
        lambda c: not _is_kind_of_balance(c.moe_router_load_balancing_type),
        "moe_router_load_balancing_type must be 'aux_loss', 'seq_aux_loss', 'global_aux_loss', 'sinkhorn' or 'none', or a list of"
        " different ones of the first three, got {moe_router_load_balancing_type!r}",
    ),
    (
        lambda c: _num_losses(c.moe_aux_loss_coeff) != _num_losses(c.moe_router_load_balancing_type),
        "moe_aux_loss_coeff must be a number, or one for each of moe_router_load_balancing_type where that is a list, got"
        " {moe_aux_loss_coeff} and {moe_router_load_balancing_type!r}",
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
            and c.moe_router_load_balancing_type != "sinkhorn"
        ),
        "moe_router_topk=1 must go with moe_router_pre_softmax, got False: a softmax over a single expert is 1"
        " whatever the router computes",
    ),
    (
        lambda c: c.moe_router_load_balancing_type in ("none", "sinkhorn") and c.moe_aux_loss_coeff != 0.0,
        "moe_aux_loss_coeff must be 0 with moe_router_load_balancing_type={moe_router_load_balancing_type!r}, got"
        " {moe_aux_loss_coeff}; leave it out, or balance by aux_loss, seq_aux_loss or global_aux_loss",
    ),
    (
        lambda c: c.moe_router_load_balancing_type == "sinkhorn" and c.moe_router_topk_scaling_factor is not None,
        "moe_router_topk_scaling_factor must be None with moe_router_load_balancing_type='sinkhorn', got"
        " {moe_router_topk_scaling_factor}: its probabilities are the scores themselves",
    ),
    (
        lambda c: (
            any(map(_negative, _listed(c.moe_aux_loss_coeff)))
            or (c.moe_z_loss_coeff is not None and _negative(c.moe_z_loss_coeff))
        ),
        "moe_aux_loss_coeff and moe_z_loss_coeff must be numbers that are not negative, got {moe_aux_loss_coeff} and"
        " {moe_z_loss_coeff}",
    ),
    (
        lambda c: c.moe_ffn_hidden_size is not None and c.moe_ffn_hidden_size < 1,
        "moe_ffn_hidden_size must be at least 1 (or None for ffn_hidden_size), got {moe_ffn_hidden_size}",
    ),
    (
        lambda c: c.moe_expert_capacity_factor is not None and c.moe_expert_capacity_factor <= 0.0,
        "moe_expert_capacity_factor must be positive (or None to drop nothing), got {moe_expert_capacity_factor}",
    ),
    (
        lambda c: (
            c.moe_expert_rank_capacity_factor is not None
            and (c.moe_expert_rank_capacity_factor <= 0.0 or c.moe_expert_capacity_factor is not None)
        ),
        "moe_expert_rank_capacity_factor must be positive and without moe_expert_capacity_factor (or None), got"
        " {moe_expert_rank_capacity_factor} and {moe_expert_capacity_factor}",
    ),
    (
        lambda c: c.moe_pad_expert_input_to_capacity and c.moe_expert_capacity_factor is None,
        "moe_pad_expert_input_to_capacity must go with moe_expert_capacity_factor, got None",
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
        lambda c: c.moe_router_num_groups is None and c.moe_router_group_topk is not None,
        "moe_router_group_topk must go with moe_router_num_groups, got None",
    ),
    (
        _are_uneven,
        "num_moe_experts must be a multiple of moe_router_num_groups, moe_router_group_topk at most these groups and at most"
        " moe_router_topk, and the chosen groups must have moe_router_topk experts, got {num_moe_experts} experts in"
        " {moe_router_num_groups} groups, of which {moe_router_group_topk} give {moe_router_topk} experts",
    ),
    (
        lambda c: _has_groups(c) and c.moe_router_load_balancing_type == "sinkhorn",
        "moe_router_num_groups must be None with moe_router_load_balancing_type='sinkhorn', got {moe_router_num_groups}",
    ),
    (
        lambda c: (
            c.moe_router_enable_expert_bias
            and (c.moe_router_score_function == "softmax" or c.moe_router_load_balancing_type == "sinkhorn")
        ),
        "moe_router_enable_expert_bias must go with moe_router_score_function 'sigmoid' or 'sqrtsoftplus' and without sinkhorn,"
        " got {moe_router_score_function!r} and {moe_router_load_balancing_type!r}",
    ),
    (
        lambda c: _negative(c.moe_router_bias_update_rate),
        "moe_router_bias_update_rate must be a number that is not negative, got {moe_router_bias_update_rate!r}",
    ),
    (
        lambda c: c.moe_latent_size is not None and (c.moe_latent_size < 1 or c.add_bias_linear),
        "moe_latent_size must be at least 1 and go with add_bias_linear=False (or None for hidden_size), got {moe_latent_size} and"
        " add_bias_linear={add_bias_linear}",
    ),
    (
        lambda c: c.moe_apply_probs_on_input and c.moe_router_topk != 1,
        "moe_apply_probs_on_input must go with moe_router_topk=1, got {moe_router_topk}: each token has one input",
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
        lambda c: c.delay_wgrad_compute and not c.overlap_moe_expert_parallel_comm,
        "delay_wgrad_compute must go with overlap_moe_expert_parallel_comm, got False: nothing is exchanged meanwhile",
    ),
    (
        lambda c: c.overlap_moe_expert_parallel_comm and c.expert_model_parallel_size == 1,
        "overlap_moe_expert_parallel_comm must go with expert_model_parallel_size above 1, got 1: no tokens are exchanged",
    ),
    (
        lambda c: (
            c.overlap_moe_expert_parallel_comm
            and c.pipeline_model_parallel_size > 1
            and c.virtual_pipeline_model_parallel_size is None
            and c.pipeline_model_parallel_layout is None
        ),
        "overlap_moe_expert_parallel_comm must go with virtual_pipeline_model_parallel_size where pipeline_model_parallel_size"
        " ({pipeline_model_parallel_size}) is above 1, got None: a forward and a backward of a rank's only stage wait for each other's",
    ),
    (
        lambda c: c.overlap_moe_expert_parallel_comm and (c.recompute_granularity == "full" or recomputes(c, "moe")),
        "overlap_moe_expert_parallel_comm must go without recomputation of layers or of 'moe', got recompute_granularity="
        "{recompute_granularity!r} and recompute_modules={recompute_modules}: exchanges would be repeated in backward",
    ),
    (
        lambda c: c.overlap_moe_expert_parallel_comm and vars(c)["moe_shared_expert_overlap"],
        "overlap_moe_expert_parallel_comm must go without moe_shared_expert_overlap, got True: shared experts are computed before the"
        " exchange",
    ),
    (
        lambda c: c.overlap_moe_expert_parallel_comm and c.cpu_offloading,
        "overlap_moe_expert_parallel_comm must go without cpu_offloading, got True: offloaded activations follow one pass at a time",
    ),
]
"""Rows like those of ``config_checks.CONTRADICTIONS``."""
