"""A small mixture-of-experts GPT, and a step of it on split ranks and on one, for every test that compares the two."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_group_builder import build_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection, group_rank, group_size
from megatron.core.rank_grid import RankGrid
from megatron.core.tensor_parallel.partition import partition
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


def reference(num_data_ranks: int, **fields: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of all data-parallel ranks and the gradients of their mean, of the model on one rank."""
    model = build_moe_gpt(**fields)
    # Each rank's auxiliary losses count as much as its mean loss.
    set_num_microbatches(model, num_data_ranks)
    losses = [mean_loss(model, rank) for rank in range(num_data_ranks)]
    torch.stack(losses).mean().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return [loss.item() for loss in losses], grads


def sharded_step(degrees: dict[str, int], fields: dict[str, Any]) -> tuple[float, dict[str, float], set[str]]:
    """One forward and backward on this rank, gradients summed as the engine sums them, against one rank's.

    Returns:
        This rank's loss, the largest relative difference of each gradient's part, and the names of the parameters.
    """
    grid = RankGrid(world_size=dist.get_world_size(), **degrees)
    groups = build_process_groups(grid)
    names = ("tensor_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size")
    own = {name: degrees[name] for name in names if name in degrees}
    own["sequence_parallel"] = degrees.get("tensor_model_parallel_size", 1) > 1
    model = build_moe_gpt(groups, **fields, **own)
    loss = mean_loss(model, group_rank(groups.dp))
    loss.backward()
    num_data_ranks = group_size(groups.dp_cp)
    _, expected = reference(num_data_ranks, **fields)
    differences = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        assert grad is not None, name
        is_expert = not getattr(parameter, "allreduce", True)
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(grad, group=groups.tp)
        group = groups.expt_dp if is_expert else groups.dp_cp
        if group is not None:
            dist.all_reduce(grad, group=group)
        grad /= num_data_ranks
        full = expected[name]
        if getattr(parameter, "tensor_model_parallel", False):
            split = groups.expt_tp if is_expert else groups.tp
            full = partition(
                full, parameter.partition_dim, parameter.partition_stride, group_rank(split), group_size(split)
            )
        differences[name] = ((grad - full).abs().max() / full.abs().max().clamp(min=1e-12)).item()
    return loss.item(), differences, set(differences)
