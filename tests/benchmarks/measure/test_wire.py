"""Bytes on the wire are counted where they are sent: in FP8 a step gathers half of what it gathers in bf16.

Weights are matrices of 256 x 256 whose halves lie on two ranks, so that there is no padding and each gather of a matrix brings
half of its elements.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.measure.wire import Wire, counted_wire
from megatron.core.distributed.fsdp import fully_shard, fully_shard_optimizer
from megatron.core.distributed.fsdp.config.placement import strategy_placements
from tests.support.float8_weights import make_codec
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)

WIDTH, NUM_LAYERS = 256, 3
HALF = WIDTH * WIDTH // 2
# One for each matrix, or for each block of 128 x 128 with rows padded to 4; each matrix's in memory of 64 floats.
SCALE_NBYTES = NUM_LAYERS * 64 * 4


def _step_wire(recipe: str | None, strategy: str, transport: str) -> Wire:
    """The bytes of the third step; recipe None: weights travel in bf16."""
    settings: dict[str, Any] = {"placements": strategy_placements(strategy), "transport": transport}
    with counted_wire() as wire:
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS))).to(torch.bfloat16)
        for layer in layers:
            if recipe is not None:
                layer.weight.fsdp_codec = make_codec(recipe)
            fully_shard(layer, **settings)
        fully_shard(layers, **settings)
        optimizer = fully_shard_optimizer(torch.optim.SGD(layers.parameters(), lr=0.1))
        for step in range(3):
            before = wire.copy()
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
            layers(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return wire.since(before)


@CHECKS.on(2)
def fp8_gathers_half_of_bf16() -> None:
    # The last layer stays gathered from forward to backward.
    for strategy, gathers in (("optim", NUM_LAYERS), ("optim_grads_params", 2 * NUM_LAYERS - 1)):
        wide = _step_wire(None, strategy, "nccl")
        assert wide == Wire(Counter({"bfloat16": gathers * HALF * 2})), (strategy, wide)
        for recipe in ("delayed", "tensorwise", "blockwise"):
            found = _step_wire(recipe, strategy, "nccl")
            assert found == Wire(Counter({"uint8": gathers * HALF}), SCALE_NBYTES), (strategy, recipe, found)


@CHECKS.on(2)
def peer_copies_are_counted_like_collectives() -> None:
    for recipe in (None, "blockwise"):
        by_collectives, by_copies = (_step_wire(recipe, "optim_grads_params", kind) for kind in ("nccl", "peer_copy"))
        assert by_copies == by_collectives, (recipe, by_copies, by_collectives)


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
