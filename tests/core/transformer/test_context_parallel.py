"""Batches and positions are cut alike, and every token is on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.transformer.context_parallel import (
    chunk_order,
    get_batch_on_this_cp_rank,
    positions_on_this_cp_rank,
)
from tests.support.launch import run_ranks


def test_each_rank_holds_an_early_and_a_late_chunk() -> None:
    """So that a causal mask leaves all ranks the same number of keys: the sums of the chunks' places are equal."""
    assert chunk_order(4) == [0, 7, 1, 6, 2, 5, 3, 4]
    for size in (1, 2, 3, 8):
        order = chunk_order(size)
        assert sorted(order) == list(range(2 * size))
        assert {order[2 * rank] + order[2 * rank + 1] for rank in range(size)} == {2 * size - 1}


def _cut() -> tuple[dict[str, Any], list[int]]:
    tokens = torch.arange(32).view(2, 16)
    batch = {"tokens": tokens, "labels": tokens + 1, "loss_mask": tokens.float(), "position_ids": tokens % 16}
    batch["dataset_id"] = torch.tensor([3, 1])  # as samples of a blend have it
    cut = get_batch_on_this_cp_rank(batch, dist.group.WORLD)
    positions = positions_on_this_cp_rank(16, dist.group.WORLD, torch.device("cpu"))
    assert cut["loss_mask"].dtype == torch.float32 and torch.equal(cut["labels"], cut["tokens"] + 1)
    assert torch.equal(cut["position_ids"], positions.expand(2, -1))
    assert cut.pop("dataset_id").tolist() == [3, 1]
    with pytest.raises(ValueError, match=r"must be \[b, s\] .* or \[b\] .*, got mask \[1, 1, 1\]"):
        get_batch_on_this_cp_rank({"mask": torch.ones(1, 1, 1)}, dist.group.WORLD)
    dist.barrier()  # a rank that ends while others still connect would be an error on them
    return {name: value.tolist() for name, value in cut.items()}, positions.tolist()


def test_batches_and_positions_are_cut_alike_and_nothing_is_lost() -> None:
    results = run_ranks(2, _cut)
    assert [positions for _, positions in results] == [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]
    for sample in range(2):
        held = [token for cut, _ in results for token in cut["tokens"][sample]]
        assert sorted(held) == list(range(16 * sample, 16 * sample + 16))


def test_without_a_split_a_batch_is_whole() -> None:
    tokens = torch.arange(7).view(1, 7)
    assert torch.equal(get_batch_on_this_cp_rank({"tokens": tokens}, None)["tokens"], tokens)
    assert positions_on_this_cp_rank(7, None, torch.device("cpu")).tolist() == list(range(7))
