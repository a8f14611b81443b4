"""A GPT with context parallelism has the losses and gradients of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.context_parallel import get_batch_on_this_cp_rank
from tests.support.launch import run_ranks
from tests.support.tiny_gpt import build_gpt, random_tokens

MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rope": ({"position_embedding_type": "rope"}, {"num_query_groups": 2, "apply_rope_fusion": True}),
    "rope_unfused": ({"position_embedding_type": "rope", "rotary_percent": 0.5}, {"rotary_interleaved": True}),
    "learned": ({"share_embeddings_and_output_weights": True}, {"recompute_granularity": "selective"}),
    "layers_differ": ({"position_embedding_type": "rope"}, {"cp_comm_type": ["a2a", "all_gather"]}),
}


def _differences(gpt_arguments: dict[str, Any], fields: dict[str, Any], *, positions: bool) -> dict[str, float]:
    """Return the relative differences of the loss and each gradient, summed over ranks, from one process's."""
    group = dist.group.WORLD
    tokens, position_ids, labels = random_tokens(num_samples=2, length=16)
    batch = {"tokens": tokens, "labels": labels, "position_ids": position_ids}
    one_rank = {name: value for name, value in fields.items() if name != "cp_comm_type"}
    whole = build_gpt(gpt_arguments, **one_rank)
    whole(tokens, position_ids, None, labels=labels).sum().backward()
    split = build_gpt(
        {**gpt_arguments, "pg_collection": ProcessGroupCollection(cp=group)},
        **fields,
        context_parallel_size=dist.get_world_size(),
    )
    own = get_batch_on_this_cp_rank(batch, group)
    given = own["position_ids"] if positions else None
    loss = split(own["tokens"], given, None, labels=own["labels"]).sum()
    loss.backward()
    expected = whole(tokens, position_ids, None, labels=labels).sum().detach()
    losses = loss.detach().clone()
    dist.all_reduce(losses)
    differences = {"loss": float((losses - expected).abs() / expected)}
    for (name, ours), theirs in zip(split.named_parameters(), whole.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None and torch.equal(ours, theirs)
        dist.all_reduce(ours.grad)
        differences[name] = float((ours.grad - theirs.grad).abs().max() / theirs.grad.abs().max())
    return differences


def _all_models() -> dict[str, dict[str, float]]:
    results = {}
    for name, (gpt_arguments, fields) in MODELS.items():
        for comm_type in ("p2p", "all_gather") if "cp_comm_type" not in fields else ("",):
            chosen = {"cp_comm_type": comm_type, **fields} if comm_type else fields
            results[f"{name} {comm_type}"] = _differences(gpt_arguments, chosen, positions=comm_type == "p2p")
    return results


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_losses_and_gradients_are_those_of_the_whole_sequence(num_ranks: int) -> None:
    """With given and default positions, rotary and learned. Sums have another order: fp32 to 1e-5."""
    for model, differences in run_ranks(num_ranks, _all_models)[0].items():
        for name, difference in differences.items():
            assert difference < 1e-5, (model, name, difference)


def test_split_matrices_and_split_sequences_go_together() -> None:
    """Tensor-parallel ranks with sequence parallelism see a context-parallel rank's part of the sequence, gathered."""
    for differences in run_ranks(4, _with_tensor_parallelism):
        assert max(differences) < 1e-5, differences


def _with_tensor_parallelism() -> list[float]:
    """Return the differences of the loss and of the gradients of a layer's projections from one process's."""
    groups = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))}
    rank = dist.get_rank()
    tp = groups[(0, 1) if rank < 2 else (2, 3)]
    cp = groups[(rank % 2, rank % 2 + 2)]
    tokens, positions, labels = random_tokens(num_samples=2, length=16)
    whole = build_gpt({"position_embedding_type": "rope"})
    expected = whole(tokens, positions, None, labels=labels).sum()
    expected.backward()
    split = build_gpt(
        {"position_embedding_type": "rope", "pg_collection": ProcessGroupCollection(tp=tp, cp=cp)},
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        context_parallel_size=2,
    )
    own = get_batch_on_this_cp_rank({"tokens": tokens, "labels": labels}, cp)
    loss = split(own["tokens"], None, None, labels=own["labels"]).sum()
    loss.backward()
    loss = loss.detach()
    dist.all_reduce(loss, group=cp)
    differences = [float((loss - expected.detach()).abs() / expected.detach())]
    ours, theirs = (model.decoder.layers[0].self_attention for model in (split, whole))
    for name, dim in (("linear_qkv", 0), ("linear_proj", 1)):
        grad, full = (getattr(attention, name).weight.grad for attention in (ours, theirs))
        dist.all_reduce(grad, group=cp)
        part = full.chunk(2, dim=dim)[tp.rank()]
        differences.append(float((grad - part).abs().max() / part.abs().max()))
    return differences


def test_a_configuration_without_its_groups_is_refused() -> None:
    """Each rank would train on its part of the sequence as if it were the whole."""
    with pytest.raises(ValueError, match=r"pg_collection.cp must have TransformerConfig.context_parallel_size \(2\)"):
        build_gpt(context_parallel_size=2)


def test_learned_positions_reach_as_far_as_the_whole_sequence() -> None:
    for message in run_ranks(2, _too_long):
        assert "max_sequence_length (16), got 20" in message


def _too_long() -> str:
    model = build_gpt({"pg_collection": ProcessGroupCollection(cp=dist.group.WORLD)}, context_parallel_size=2)
    with pytest.raises(ValueError) as raised:
        model(torch.zeros(1, 10, dtype=torch.long), None, None)
    dist.barrier()  # a rank that ends while others still connect would be an error on them
    return str(raised.value)
