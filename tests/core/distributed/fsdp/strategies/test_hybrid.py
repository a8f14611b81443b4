"""Hybrid sharding trains as no sharding does: over the inner axis each microbatch, over the outer one once a step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp import (
    FlatAdamW,
    MixedPrecisionPolicy,
    fully_shard,
    fully_shard_optimizer,
    hybrid_placements,
    microbatch,
)
from megatron.core.distributed.fsdp.buffers.gradients import Gradients
from megatron.core.distributed.fsdp.buffers.parameter_group import group_of
from megatron.core.distributed.fsdp.comm.process_group import RankOrderTransport
from megatron.core.distributed.fsdp.config.placement import strategy_placements
from tests.support.hybrid import (
    HYBRIDS,
    KINDS,
    WORLD,
    assert_equal_rows,
    assert_rows,
    backward_in_order,
    backward_sharded,
    descend,
    hybrid_mesh,
    make_hybrid_net,
    pieces_of,
    steps_in_order,
)
from tests.support.logging_streams import LoggingStreams
from tests.support.models import (
    Net,
    assert_at_rest,
    context_of,
    difference,
    full,
    loss_of,
    make_net,
)
from tests.support.rank_checks import RankChecks
from tests.support.watched_schedule import watch_optimizer, watched_schedule

CHECKS = RankChecks(__name__)


# ---- numbers --------------------------------------------------------------------------------------------------------


def _assert_trains(net: Net, strategy: str, num_microbatches: int, *, num_steps: int = 3) -> None:
    """Losses, gradients and weights equal those of a net without the engine, to the last bit. Ranks: all."""
    for step, expected in enumerate(steps_in_order(strategy, num_microbatches, num_steps)):
        losses = backward_sharded(net, step, num_microbatches)
        assert all(map(torch.equal, losses, expected.losses)), (losses, expected.losses)
        assert_rows(net, expected.gradients, of_gradients=True)
        descend(net)
        assert_rows(net, expected.weights)
    assert context_of(net).planner.plan is not None
    assert_at_rest(net)


@CHECKS.on(WORLD)
def hybrid_sharding_equals_no_sharding_to_the_last_bit() -> None:
    """For all strategies inside and outside, with overlap and without.

    The outer reduction comes once a step, on the last microbatch, right after the inner one, whatever overlaps; where
    gradients rest partial inside, the inner one comes there too.
    """
    units = ["blocks.1.", "blocks.0.", ""]
    for strategy, outer in HYBRIDS:
        early = [] if strategy in ("no_shard", "optim") else [f"inner {unit}" for unit in units]
        last = [f"{axis} {unit}" for unit in units for axis in ("inner", "outer")]
        for num_microbatches, overlaps in ((1, True), (3, False), *([(3, True)] if (strategy, outer) in KINDS else [])):
            with _reductions() as log:
                net = make_hybrid_net(strategy, outer, overlaps=overlaps)
                _assert_trains(net, strategy, num_microbatches)
            assert log == (early * (num_microbatches - 1) + last) * 3, (strategy, outer, log)


@CHECKS.on(WORLD)
def peer_copy_inside_equals_no_sharding_to_the_last_bit() -> None:
    """Over the outer axis the process group moves what lies in peer memory."""
    for strategy, outer in (
        ("optim_grads_params", "no_shard"),
        ("optim_grads_params", "optim"),
        ("optim_grads", "optim"),
    ):
        net = make_hybrid_net(strategy, outer, transport="peer_copy")
        axes = net.blocks[0].parameter_groups[0].group_mesh.axes
        assert [axis.name for axis in axes] == ["gloo", "peer_copy"]
        _assert_trains(net, strategy, 2, num_steps=4)


@CHECKS.on(WORLD)
def gradients_add_up_over_backwards_that_are_each_a_last_one() -> None:
    """Without ``microbatch`` each backward reduces over both axes, into the gradient that is there."""
    for strategy, outer in KINDS:
        net, plain = make_hybrid_net(strategy, outer), make_net(2)
        for piece in pieces_of(0, 2):
            loss_of(net, piece[dist.get_rank()]).backward()
        torch.stack([loss_of(plain, piece) for of_ranks in pieces_of(0, 2) for piece in of_ranks]).sum().backward()
        for parameter, own in zip(net.parameters(), plain.parameters(), strict=True):
            assert own.grad is not None
            # The sum over ranks comes before that over microbatches here: a few roundings.
            assert difference(full(parameter.grad), own.grad / WORLD) <= 1e-6


@CHECKS.on(WORLD)
def a_unit_that_the_last_microbatch_does_not_use_is_reduced_at_its_end() -> None:
    """What earlier microbatches have left there is not lost."""
    for strategy, outer in KINDS:
        net, plain = make_hybrid_net(strategy, outer), make_net(2)
        pieces = pieces_of(0, 3)
        orders = [[0, 1], [0, 1], [1]]
        for at, (order, of_ranks) in enumerate(zip(orders, pieces, strict=True)):
            net.order = plain.order = order
            with microbatch(net, is_first=at == 0, is_last=at == 2):
                loss_of(net, of_ranks[dist.get_rank()]).backward()
            torch.stack([loss_of(plain, piece) for piece in of_ranks]).mean().backward()
        for parameter, own in zip(net.parameters(), plain.parameters(), strict=True):
            assert own.grad is not None
            assert difference(full(parameter.grad), own.grad) <= 1e-6  # another order of sums
        assert_at_rest(net)


@CHECKS.on(WORLD)
def sums_that_wait_are_kept_until_somebody_gives_them_up() -> None:
    """A scope says nothing but which microbatch is the last; ``zero_grad`` of a plain optimizer, or of one weight, gives up."""
    for strategy, outer in KINDS:
        net, plain = make_hybrid_net(strategy, outer), make_net(2)
        pieces = pieces_of(0, 6)
        for at, of_ranks in enumerate(pieces):
            with microbatch(net, is_last=at in (2, 5)):
                loss_of(net, of_ranks[dist.get_rank()]).backward()
            torch.stack([loss_of(plain, piece) for piece in of_ranks]).mean().backward()
            for either in (net, plain):
                if at == 1:
                    either.blocks[0].up.weight.grad = None
                    either.head.bias.grad.zero_()
                if at == 3:
                    torch.optim.SGD(either.parameters(), lr=0.1).zero_grad()
            if at in (2, 5):
                for parameter, own in zip(net.parameters(), plain.parameters(), strict=True):
                    assert own.grad is not None
                    assert difference(full(parameter.grad), own.grad) <= 1e-6  # another order of sums
        assert_at_rest(net)


@CHECKS.on(WORLD)
def a_step_that_fails_leaves_nothing_behind() -> None:
    """Neither a backward that raises, nor microbatches without a last one."""
    for strategy, outer in KINDS:
        net, plain = make_hybrid_net(strategy, outer), make_net(2)
        for step in range(2):
            backward_sharded(net, step, 2)
            net.zero_grad()
        with microbatch(net, is_last=False):
            loss_of(net, pieces_of(7, 1)[0][0]).backward()
        assert all(group.grads.refresh_pending() for group in context_of(net).groups)
        optimizer = fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        with pytest.raises(RuntimeError, match="the last microbatch has not come"):
            optimizer.step()

        def fail(grad: torch.Tensor) -> None:
            raise ZeroDivisionError

        def fail_in_the_first(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = block(x)
            if block is net.blocks[0]:  # noqa: B023
                out.register_hook(fail)
            return out

        net.around = fail_in_the_first
        with pytest.raises(ZeroDivisionError), microbatch(net, is_first=False, is_last=False):
            loss_of(net, pieces_of(8, 1)[0][0]).backward()
        net.around = lambda block, x: block(x)
        net.zero_grad()
        backward_sharded(net, 0, 2)
        backward_in_order(plain, 0, 2, strategy)
        assert_equal_rows(net, plain, gradients=True)


@CHECKS.on(WORLD)
def bf16_rounds_on_the_wires_alone() -> None:
    """Gradients travel in bf16 over both axes and are added in fp32: three roundings of 2^-9, relative to the largest."""
    policy = MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16)
    for strategy, outer in KINDS:
        net, plain = make_hybrid_net(strategy, outer, mixed_precision_policy=policy), make_net(2)
        backward_sharded(net, 0, 3)
        backward_in_order(plain, 0, 3, strategy)
        for parameter, own in zip(net.parameters(), plain.parameters(), strict=True):
            assert own.grad is not None and parameter.grad is not None
            assert parameter.grad.dtype == torch.float32
            assert 0 < difference(full(parameter.grad), own.grad) <= 1.5e-2


@CHECKS.on(WORLD)
def bf16_forwards_compute_with_the_main_weights_of_their_step() -> None:
    """Each rank casts its piece, and gets the others' over the outer axis before the inner ones."""
    for strategy, outer in KINDS:
        net, plain = make_hybrid_net(strategy, outer, dtype=torch.bfloat16), make_net(2, dtype=torch.bfloat16)
        for step in range(3):
            backward_sharded(net, step, 1)
            descend(net)
            plain.load_state_dict({name: full(weight) for name, weight in net.named_parameters()})
            piece = pieces_of(step, 1)[0][dist.get_rank()]
            assert torch.equal(loss_of(net, piece), loss_of(plain, piece))


# ---- optimizers and state -------------------------------------------------------------------------------------------


@CHECKS.on(WORLD)
def flat_adamw_equals_no_sharding() -> None:
    """Norms are sums over shards, so a clipped step differs by the rounding of the factor."""
    rates = {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-3}
    for strategy, outer in KINDS:
        net, plain = make_hybrid_net(strategy, outer), make_net(2)
        ours = FlatAdamW(net.parameters(), **rates)  # type: ignore[arg-type]
        theirs = torch.optim.AdamW(plain.parameters(), **rates)  # type: ignore[arg-type]
        for step in range(3):
            backward_sharded(net, step, 2)
            backward_in_order(plain, step, 2, strategy)
            expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            assert difference(ours.grad_norm(), expected) <= 1e-6
            ours.step(grad_factor=0.1 / (expected + 1e-6))
            theirs.step()
            ours.zero_grad()
        for parameter, own in zip(net.parameters(), plain.parameters(), strict=True):
            assert difference(full(parameter), own.detach()) <= 2e-6


@CHECKS.on(WORLD)
def torchs_optimizers_and_clipping_equal_no_sharding() -> None:
    """On DTensors that two axes cut."""
    net, plain = make_hybrid_net("optim_grads_params", "optim"), make_net(2)
    ours = fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        backward_sharded(net, step, 1)
        backward_in_order(plain, step, 1, "optim_grads_params")
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        assert difference(full(nn.utils.clip_grad_norm_(net.parameters(), 0.1)), expected) <= 1e-6
        ours.step()
        theirs.step()
        ours.zero_grad()
    for parameter, own in zip(net.parameters(), plain.parameters(), strict=True):
        assert difference(full(parameter), own.detach()) <= 2e-6


@CHECKS.on(WORLD)
def full_and_sharded_state_is_loaded_and_in_effect() -> None:
    for strategy, outer in KINDS:
        source, plain = make_hybrid_net(strategy, outer), make_net(2, seed=5)
        backward_sharded(source, 0, 1)
        source.zero_grad()
        source.load_state_dict(plain.state_dict())
        assert_equal_rows(source, plain, gradients=False)
        other = make_hybrid_net("optim_grads_params", "optim" if outer == "no_shard" else "no_shard")
        state = source.state_dict()
        assert all(isinstance(value, DTensor) for value in state.values())
        other.load_state_dict(state)  # of another placement
        for net in (source, other):
            assert torch.equal(loss_of(net, pieces_of(1, 1)[0][0]), loss_of(plain, pieces_of(1, 1)[0][0]))


@CHECKS.on(WORLD)
def ranks_that_start_apart_are_made_alike() -> None:
    """All get the weights of the mesh's first rank; a replica that drifts is brought back."""
    for outer in ("no_shard", "optim"):
        torch.manual_seed(dist.get_rank())
        net = Net(1)
        first = [parameter.detach().clone() for parameter in net.parameters()]
        for tensor in first:
            dist.broadcast(tensor, src=0)
        for unit in (net.blocks[0], net):
            fully_shard(unit, hybrid_mesh(), hybrid_placements("optim_grads_params", outer))
        assert all(map(torch.equal, map(full, net.parameters()), first))
        if outer == "no_shard":
            for group in context_of(net).groups:
                group.weights.main.local.add_(float(dist.get_rank() // 2))
                group.weights.broadcast_replicas()
            assert all(map(torch.equal, map(full, net.parameters()), first))


# ---- collectives ----------------------------------------------------------------------------------------------------


@CHECKS.on(2, 4)
def a_mesh_of_two_axes_is_hybrid_sharding_by_itself() -> None:
    """As in FSDP2: sharded over the inner axis, replicated over the outer one; gradients are the mean of all ranks."""
    num_ranks = dist.get_world_size()
    shapes = [(1, 2), (2, 1)] if num_ranks == 2 else [(2, 2)]
    for shape, names in itertools.product(shapes, (None, ("outer", "inner"))):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        linear = nn.Linear(3, 4, bias=False)
        nn.init.ones_(linear.weight)
        fully_shard(linear, mesh)
        linear(torch.full((1, 3), 1.0 + dist.get_rank())).sum().backward()
        assert torch.equal(full(linear.weight.grad), torch.full((4, 3), (1 + num_ranks) / 2))


@contextmanager
def _reductions() -> Iterator[list[str]]:
    """What is reduced over which axis, in order: "inner blocks.0.", "outer blocks.0."."""
    log: list[str] = []
    current: list[str] = []
    depth = [0]
    reduce = Gradients.reduce

    def watched_reduce(grads: Gradients, **options: Any) -> None:
        group = group_of(grads._sharded[0])
        assert group is not None
        current[:] = [group.prefix]
        reduce(grads, **options)
        current.clear()

    def watched(call: Callable[..., None]) -> Callable[..., None]:
        def moved(transport: RankOrderTransport, *args: Any, **options: Any) -> None:
            if current and not depth[0]:
                is_outer = transport.ranks[1] - transport.ranks[0] == 2
                log.append(f"{'outer' if is_outer else 'inner'} {current[0]}")
            depth[0] += 1
            call(transport, *args, **options)
            depth[0] -= 1

        return moved

    with ExitStack() as patches:  # before groups are made: they look the functions up once
        patches.enter_context(patch.object(Gradients, "reduce", watched_reduce))
        for name in ("reduce_scatter", "all_reduce"):
            patches.enter_context(patch.object(RankOrderTransport, name, watched(getattr(RankOrderTransport, name))))
        yield log


@CHECKS.on(WORLD)
def what_waits_for_the_outer_axis_travels_over_it_alone() -> None:
    """When the last microbatch is told after its backward, nothing is reduced over the inner axis again."""
    for outer in ("no_shard", "optim"):
        with _reductions() as log:
            net = make_hybrid_net("optim_grads_params", outer)
            context = context_of(net)
            with context.state.accumulate():
                loss_of(net, pieces_of(0, 1)[0][dist.get_rank()]).backward()
            assert sorted(log) == ["inner ", "inner blocks.0.", "inner blocks.1."]
            log.clear()
            context.reduce_partial()
        assert sorted(log) == ["outer ", "outer blocks.0.", "outer blocks.1."]
        assert_at_rest(net)


@CHECKS.on(WORLD)
def streams_are_ordered_and_the_outer_reduction_is_off_the_compute_stream() -> None:
    for strategy, outer in KINDS:
        with watched_schedule(LoggingStreams()) as streams:
            net = make_hybrid_net(strategy, outer, mixed_precision_policy=MixedPrecisionPolicy(), dtype=torch.bfloat16)
            context_of(net).change_options(poisons=False)
            optimizer = fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
            watch_optimizer(streams, optimizer, context_of(net).groups)
            for step in range(4):
                begin = len(streams.log)
                backward_sharded(net, step, 1 + step % 3)
                optimizer.step()
                optimizer.zero_grad()
        assert not streams.races, streams.races[:5]
        last = streams.log[begin:]
        assert last.count("wait GRADS_REDUCED") == 1, last


# ---- several meshes and memory --------------------------------------------------------------------------------------


@CHECKS.on(WORLD)
def units_over_different_ranks_share_a_model_whatever_moves_their_bytes() -> None:
    """One block over both axes, one over the inner ranks alone, which thus differs between the outer ones."""

    def train(transport: str) -> list[torch.Tensor]:
        net = make_net(3)
        inner = strategy_placements("optim_grads_params", "inner")
        hybrid = hybrid_placements("optim_grads_params", "optim")
        for module, placements in (
            (net.blocks[0], hybrid),
            (net.blocks[1], inner),
            (net.blocks[2], hybrid),
            (net, inner),
        ):
            fully_shard(module, hybrid_mesh(), placements, transport=transport)  # type: ignore[arg-type]
        for step in range(4):
            backward_sharded(net, step, 2)
            descend(net)
        assert context_of(net).planner.plan is not None
        return [full(parameter) for parameter in net.parameters()]

    assert all(map(torch.equal, train("nccl"), train("peer_copy")))


@CHECKS.on(WORLD)
def transports_of_different_ranks_have_arenas_of_their_own() -> None:
    """The whole model over four ranks by peer copy, but for one block, which pairs hold."""
    everyone = init_device_mesh("cpu", (WORLD,))

    def train(transport: str) -> tuple[Net, list[torch.Tensor]]:
        net = make_net(3)
        inner = strategy_placements("optim_grads_params", "inner")
        for module in net.blocks[0], net.blocks[2]:
            fully_shard(module, everyone, transport=transport)  # type: ignore[arg-type]
        fully_shard(net.blocks[1], hybrid_mesh(), inner, transport=transport)  # type: ignore[arg-type]
        fully_shard(net, everyone, transport=transport)  # type: ignore[arg-type]
        for step in range(4):
            backward_sharded(net, step, 1)
            descend(net)
        return net, [full(parameter) for parameter in net.parameters()]

    net, weights = train("peer_copy")
    plan = context_of(net).planner.plan
    assert plan is not None and len(plan.inputs.pools) == len(plan.weights.pools) == 2
    assert plan.weights.nbytes == sum(pool.nbytes for pool in plan.weights.pools)
    assert all(map(torch.equal, weights, train("nccl")[1]))


@CHECKS.on(WORLD)
def the_report_knows_sums_that_wait_for_the_outer_axis() -> None:
    """Between microbatches they take what the inner axis leaves of the gradients, and nothing after the last one."""
    for outer in ("no_shard", "optim"):
        net = make_hybrid_net("optim_grads_params", outer)
        context = context_of(net)
        inner_nbytes = sum(group.layout.total_numel * 4 // 2 for group in context.groups)
        assert context.describe().partial_gradients == inner_nbytes
        # Main weights are this rank's shard, or lie in it.
        assert context.describe().persistent == inner_nbytes
        assert context.describe().main_weights == inner_nbytes // (2 if outer == "optim" else 1)
        with microbatch(net, is_last=False):
            loss_of(net, pieces_of(0, 1)[0][0]).backward()
        kept = [group.grads.accumulator.storage for group in context.groups]
        assert sum(storage.flat.untyped_storage().size() for storage in kept if storage is not None) == inner_nbytes
        assert not any(group.grads.main.storage.allocated for group in context.groups)
        with microbatch(net, is_first=False):
            loss_of(net, pieces_of(0, 1)[0][0]).backward()
        assert not any(storage.allocated for storage in kept)


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_hybrid(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
