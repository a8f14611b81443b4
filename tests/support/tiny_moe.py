"""A small mixture-of-experts GPT, and a step of it on split ranks and on one, for every test that compares the two."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.module_names import named_parameters
from megatron.core.process_group_builder import build_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection, group_rank, group_size
from megatron.core.rank_grid import RankGrid
from megatron.core.tensor_parallel.partition import partition
from megatron.core.transformer.context_parallel import get_batch_on_this_cp_rank
from megatron.core.transformer.moe.router import set_num_microbatches
from megatron.core.transformer.transformer_config import TransformerConfig

VOCAB_SIZE, LENGTH = 48, 12

FIELDS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "activation_func": "silu",
    "normalization": "RMSNorm",
    # Wide enough that experts differ and no choice of the router is a near tie.
    "init_method_std": 0.3,
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 12,
    "moe_aux_loss_coeff": 0.05,
    "moe_z_loss_coeff": 0.01,
    "moe_shared_expert_intermediate_size": 8,
}


def build_moe_gpt(pg_collection: ProcessGroupCollection | None = None, **fields: Any) -> GPTModel:
    """A GPT of ``FIELDS`` and ``fields``, this rank's part of it."""
    config = TransformerConfig(**{**FIELDS, **fields})
    return GPTModel(
        config,
        get_gpt_decoder_block_spec(config),
        vocab_size=VOCAB_SIZE,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        pg_collection=pg_collection,
    )


def tokens_of(data_rank: int, num_samples: int = 2) -> torch.Tensor:
    """[num_samples, LENGTH + 1] of a data-parallel rank."""
    return torch.randint(VOCAB_SIZE, (num_samples, LENGTH + 1), generator=torch.Generator().manual_seed(17 + data_rank))


def mean_loss(model: GPTModel, data_rank: int) -> torch.Tensor:
    """[] of a data-parallel rank's tokens."""
    tokens = tokens_of(data_rank)
    return model(tokens[:, :-1], None, None, labels=tokens[:, 1:]).mean()


class Reference(NamedTuple):
    """What the model on one rank computes; numbers that travel between processes."""

    losses: list[float]
    """Of all data-parallel ranks."""
    gradients: dict[str, npt.NDArray[np.float32]]
    """Of the mean of the losses, by parameter."""


def reference(num_data_ranks: int, **fields: Any) -> Reference:
    """Losses of all data-parallel ranks and the gradients of their mean, of the model on one rank."""
    model = build_moe_gpt(**fields)
    # Each rank's auxiliary losses count as much as its mean loss.
    set_num_microbatches(model, num_data_ranks)
    losses = [mean_loss(model, rank) for rank in range(num_data_ranks)]
    torch.stack(losses).mean().backward()
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    return Reference([loss.item() for loss in losses], gradients)


def sharded_step(degrees: dict[str, Any], fields: dict[str, Any], expected: Reference) -> tuple[float, float]:
    """One forward and backward on this rank, gradients summed as the engine sums them, against one rank's.

    Returns:
        The relative difference of the loss of this rank's samples, and the largest of a gradient (of this rank's part).
    """
    groups = build_process_groups(RankGrid(world_size=dist.get_world_size(), **degrees))
    model = build_moe_gpt(groups, **fields, **degrees, sequence_parallel=group_size(groups.tp) > 1)
    loss = mean_loss_of_part(model, group_rank(groups.dp), groups.cp)
    loss.backward()
    worst = 0.0
    for name, parameter in named_parameters(model):
        assert parameter.grad is not None, name
        _sum_as_the_engine(parameter, groups)
        theirs = own_part(torch.from_numpy(expected.gradients[name]), parameter, groups)
        worst = max(worst, difference(parameter.grad, theirs))
    loss = loss.detach() / group_size(groups.cp)
    if groups.cp is not None:
        dist.all_reduce(loss, group=groups.cp)
    return difference(loss, torch.tensor(expected.losses[group_rank(groups.dp)])), worst


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest one, by the largest value."""
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-12))


def mean_loss_of_part(model: nn.Module, data_rank: int, cp_group: ProcessGroup | None) -> torch.Tensor:
    """[] whose mean over context-parallel ranks is the mean over all tokens."""
    tokens = tokens_of(data_rank)
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
    if cp_group is not None:
        batch = get_batch_on_this_cp_rank(batch, cp_group)
    return model(batch["tokens"], None, None, labels=batch["labels"]).mean()


def _is_expert(parameter: torch.Tensor) -> bool:
    return not getattr(parameter, "allreduce", True)


def _sum_as_the_engine(parameter: torch.Tensor, groups: ProcessGroupCollection) -> None:
    """The mean over dp_cp of dense gradients; the sum of all ranks' contributions by as many of experts' gradients."""
    grad = parameter.grad
    assert grad is not None
    if getattr(parameter, "sequence_parallel", False):
        dist.all_reduce(grad, group=groups.tp)
    group = groups.expt_dp if _is_expert(parameter) else groups.dp_cp
    if group is not None:
        dist.all_reduce(grad, group=group)
    grad /= group_size(groups.dp_cp)


def own_part(full: torch.Tensor, parameter: Any, groups: ProcessGroupCollection) -> torch.Tensor:
    """What this tensor-parallel rank holds of a full tensor."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return full
    group = groups.expt_tp if _is_expert(parameter) else groups.tp
    dim, stride = parameter.partition_dim, parameter.partition_stride
    return partition(full, dim, stride, group_rank(group), group_size(group))
