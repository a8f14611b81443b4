"""Training of sharded and whole nets whose weights are bytes, compared after each step to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.distributed.fsdp import (
    Fp8Codec,
    MixedPrecisionPolicy,
    fully_shard,
    fully_shard_optimizer,
    hybrid_placements,
    microbatch,
)
from megatron.core.distributed.fsdp.config.placement import strategy_placements
from megatron.core.distributed.fsdp.dtensor.placements import local_rows
from tests.support.float8_weights import Fp8Net, WholeNet, fp8_batch, fp8_loss, make_fp8_net
from tests.support.models import assert_at_rest, context_of, local_of

NUM_STEPS = 4
LEARNING_RATE = 0.5


def shard(net: Fp8Net, strategy: str, outer: str | None = None, **settings: Any) -> Fp8Net:
    """Each block and the root a unit. Ranks: all."""
    mesh = None
    settings = {"placements": strategy_placements(strategy), **settings}
    if outer is not None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        settings["placements"] = hybrid_placements(strategy, outer, ("outer", "inner"))
    for module in (*net.blocks, net):
        fully_shard(module, mesh, **settings)
    context_of(net).change_options(poisons=True)
    return net


def scaled_groups(net: nn.Module) -> list[Any]:
    """The groups whose weights rest in bytes."""
    return [group for group in context_of(net).groups if not group.weights.codec.casts]


def assert_same_bytes(net: Fp8Net, whole: WholeNet) -> None:
    """This rank's bytes are its part of the whole weight's."""
    for group in scaled_groups(net):
        model = group.weights.model
        assert model.local.dtype == torch.uint8
        for index in range(len(group.parameters)):
            expected = whole.data[group.name_of(index)].flatten()
            slot = group.layout.slots[index]
            low, high = max(slot.start, model.begin), min(slot.start + slot.numel, model.end)
            if low < high:
                own = model.local[low - model.begin : high - model.begin]
                assert torch.equal(own, expected[low - slot.start : high - slot.start]), group.name_of(index)


def assert_same_weights(net: Fp8Net, expected: dict[str, torch.Tensor]) -> None:
    for name, parameter in net.named_parameters():
        assert torch.equal(local_of(parameter), local_rows(parameter, expected[name])), name  # type: ignore[arg-type]


def train_pair(
    codec: Fp8Codec | None,
    strategy: str,
    outer: str | None = None,
    *,
    nets: Callable[[], tuple[Fp8Net, WholeNet]] | None = None,
    num_microbatches: int = 1,
    disturb: Callable[[Fp8Net], None] = lambda net: None,
    **settings: Any,
) -> Fp8Net:
    """Train a sharded net and a whole one by gradient descent, and compare after each step. Ranks: all.

    Args:
        nets: makes what is sharded and the whole one; None: nets whose weights have the codec.

    Layers compute in bf16, whose products do not depend on where matrices lie. Gradients travel in fp32, so that sums over
    microbatches are not rounded on the way.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    settings.setdefault("mixed_precision_policy", MixedPrecisionPolicy(grad_comm_dtype=torch.float32))
    made, whole = (make_fp8_net(codec), WholeNet(codec)) if nets is None else nets()
    net = shard(made, strategy, outer, **settings)
    optimizer = fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=LEARNING_RATE))
    sums_microbatches_first = strategy in ("no_shard", "optim")
    for step in range(NUM_STEPS):
        whole.write()
        flat = fp8_batch(step, num_microbatches * world)
        of_pieces: list[list[list[Any]]] = []
        for at in range(num_microbatches):
            of_ranks = [whole.gradients(flat[at * world + other], share=num_microbatches) for other in range(world)]
            with microbatch(net, is_first=at == 0, is_last=at == num_microbatches - 1):
                loss = fp8_loss(net, flat[at * world + rank])
                (loss / num_microbatches).backward()
            assert_same_bytes(net, whole)
            assert torch.equal(loss, of_ranks[rank][0]), (codec, strategy, outer, step, loss, of_ranks[rank][0])
            of_pieces.append([gradients for _, gradients in of_ranks])
        for index, (name, main) in enumerate(whole.main.items()):
            grads = [[of_rank[index].float() for of_rank in of_ranks] for of_ranks in of_pieces]
            grad = mean_in_order(grads, first_over_microbatches=sums_microbatches_first, hybrid=outer is not None)
            whole.main[name] = main - LEARNING_RATE * grad
        optimizer.step()
        optimizer.zero_grad()
        assert_same_weights(net, whole.main)
        disturb(net)
    assert context_of(net).planner.plan is not None
    assert_at_rest(net)
    return net


def train_own_batches(net: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[torch.Tensor]:
    """Train on these steps' batches, this rank on its own, and return its losses. Ranks: two."""
    losses = []
    for step in steps:
        loss = fp8_loss(net, fp8_batch(step, 2)[dist.get_rank()])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def mean_in_order(grads: list[list[torch.Tensor]], *, first_over_microbatches: bool, hybrid: bool) -> torch.Tensor:
    """The mean over ranks of [microbatches][ranks] gradients, summed as the engine sums; 2 or 4 ranks scale exactly."""
    world = len(grads[0])
    if hybrid:
        half = world // 2
        inner = [
            _sum_in_order([of_ranks[:half] for of_ranks in grads], first_over_microbatches),
            _sum_in_order([of_ranks[half:] for of_ranks in grads], first_over_microbatches),
        ]
        return (inner[0] + inner[1]) / world
    return _sum_in_order(grads, first_over_microbatches) / world


def _sum_in_order(grads: list[list[torch.Tensor]], first_over_microbatches: bool) -> torch.Tensor:
    rows = [list(column) for column in zip(*grads, strict=True)] if first_over_microbatches else grads
    sums = []
    for row in rows:
        total = row[0]
        for other in row[1:]:
            total = total + other
        sums.append(total)
    total = sums[0]
    for other in sums[1:]:
        total = total + other
    return total
