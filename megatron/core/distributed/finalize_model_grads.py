"""Completion of a step's gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from megatron.core.model_wrappers import get_model_config
from megatron.core.process_groups_config import ProcessGroupCollection, group_of, group_size
from megatron.core.transformer.moe.auxiliary_losses import balancing_losses
from megatron.core.transformer.moe.expert_bias import routers_with_bias, update_expert_biases
from megatron.core.transformer.moe.router import forget_running_counts


def finalize_model_grads(
    model: Sequence[torch.nn.Module],
    num_tokens: torch.Tensor | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    force_all_reduce: bool | None = False,
) -> None:
    """Complete the gradients of a step: after it they are those of the global batch, on all ranks that hold a weight.

    It also updates the routers' expert biases, where the model has them, and ends what they count for a loss over the step.

    The engine sums gradients over data-parallel ranks, those of replicated weights over tensor-parallel ranks, and those of
    tied embeddings over the first and the last stage.

    Args:
        model: [1] the wrapped model.
        num_tokens: [] tokens of this rank's microbatches, known on the last stage; gradients are divided by the tokens of all
            ranks. None: the losses were divided.
        pg_collection: None: the groups of the wrapped model, or else of ``parallel_state``.
        force_all_reduce: accepted; each strategy reduces in one way.

    Ranks: all of the model's groups; does not block the host on CUDA.
    Source: Megatron-Core's function of this name.
    """
    config = get_model_config(model[0])
    timers = config.timers
    if timers is not None:
        timers("all-grads-sync", log_level=1).start()
    for chunk in model:
        chunk.finish_grad_sync(force_all_reduce=bool(force_all_reduce))  # type: ignore[operator]
    if timers is not None:
        timers("all-grads-sync").stop()
    groups: Any = pg_collection or getattr(model[0], "pg_collection", None)
    if config.moe_router_enable_expert_bias:
        routers = [router for chunk in model for router in routers_with_bias(chunk)]
        update_expert_biases(routers, config.moe_router_bias_update_rate, groups)
    if "global_aux_loss" in balancing_losses(config):
        for chunk in model:
            forget_running_counts(chunk)
    if num_tokens is None:
        return
    stages, data = group_of(groups, "pp"), group_of(groups, "dp_cp") or group_of(groups, "dp")
    total = num_tokens.clone()
    if group_size(stages) > 1:
        dist.all_reduce(total, group=stages)  # other stages count none
    if group_size(data) > 1:
        dist.all_reduce(total, group=data)
    for chunk in model:
        chunk.scale_gradients(1.0 / total.clamp(min=1).float())  # type: ignore[operator]


def _get_main_grad_attr(param: torch.nn.Parameter) -> str:
    """Return the name of the attribute that has the complete gradient of a parameter."""
    return "main_grad" if hasattr(param, "main_grad") else "grad"


def _unshard_if_dtensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor of a DTensor, or the tensor itself. Ranks: all of its mesh."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _reshard_if_dtensor(tensor: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Split a whole tensor as the reference is split, if this is a DTensor. Ranks: each on its own."""
    if not isinstance(reference, DTensor):
        return tensor
    return distribute_tensor(tensor, reference.device_mesh, reference.placements, src_data_rank=None)
