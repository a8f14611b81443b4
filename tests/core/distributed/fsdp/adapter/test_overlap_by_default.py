"""Communication overlaps computation by default, as in Megatron-FSDP, through each entry point.

In Megatron-FSDP, strategies that shard weights always prefetch them, and strategies that shard gradients always overlap reductions.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest import TestCase

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.fsdp import FSDPDistributedIndex, FullyShardedDataParallel
from megatron.core.distributed.fsdp.api.module import FsdpModule, contexts_of, fsdp_modules
from megatron.core.distributed.fsdp.comm.streams import Edge
from megatron.core.distributed.fsdp.src.megatron_fsdp import MegatronFSDP, fully_shard_model
from megatron.training.arguments import parse_settings
from tests.support.hybrid import hybrid_mesh
from tests.support.models import STRATEGY_NAMES, Block, global_batch, loss_of, make_net, shard_net, watch_collectives
from tests.support.rank_checks import RankChecks
from tests.support.tiny_gpt import VOCAB_SIZE, build_gpt
from tests.support.tiny_run import TINY

CHECKS = RankChecks(__name__)
Loss = Callable[[], torch.Tensor]

ALWAYS = {
    "no_shard": (False, False),
    "optim": (False, False),
    "optim_grads": (False, True),
    "optim_grads_params": (True, True),
}
"""By strategy: whether weights are prefetched and whether reductions overlap by default."""


def _seen(module: nn.Module, loss: Loss) -> tuple[set[int], set[int], bool]:
    """Return how many units are prefetched while one runs, in forward and in backward, and whether reductions overlap.

    The first and last units of a pass are not counted: they have nothing to prefetch, or it is already there.
    """
    (context,) = contexts_of(module)
    for _ in range(3):
        loss().backward()
    assert context.planner.plan is not None
    owners = {group.index: unit.index for unit in context.units for group in unit.own_groups}
    events: list[tuple[str, int]] = []
    num_waits = 0

    def issue(what: str, group: int) -> None:
        events.append((what.partition(" ")[2] if "gather" in what else "reduction", owners[group]))

    def wait(edge: Edge, event: object) -> None:
        nonlocal num_waits
        num_waits += edge is Edge.GRADS_REDUCED

    watch_collectives(context, issue)
    context.streams.wait = wait  # type: ignore[method-assign]

    def begin(part: FsdpModule, args: Any, kwargs: Any) -> Any:
        index = part._fsdp_unit.index
        events.append(("run", index))

        def marked(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.requires_grad:
                return value
            value = value.view_as(value)  # its gradient arrives before the gradient of the previous unit's output
            value.register_hook(lambda _: events.append(("ran back", index)))
            return value

        return tuple(map(marked, args)), {name: marked(value) for name, value in kwargs.items()}

    for part in fsdp_modules(module):
        part.register_forward_pre_hook(begin, with_kwargs=True)
    value = loss()
    turn = len(events)
    value.backward()
    in_order = [index for kind, index in events[:turn] if kind == "run"]
    assert len(in_order) == len(context.units)
    reduced = [index for kind, index in events if kind == "reduction"]
    assert reduced[:-1] == in_order[:0:-1], "the root last"
    backwards = [index for kind, index in events if kind == "ran back"]
    assert backwards == in_order[: -1 - len(backwards) : -1] and len(backwards) >= 3
    for later, earlier in pairwise(backwards):
        # One unit late: a unit's reduction is launched when the backward of the preceding unit begins.
        at = events.index(("reduction", later))
        assert events.index(("ran back", later)) < at < events.index(("ran back", earlier)), events
    num_groups = sum(len(unit.own_groups) for unit in context.units)
    assert num_waits in (1, 1 + num_groups), num_waits
    return _ahead(events[:turn], "run"), _ahead(events[turn:], "ran back"), num_waits == 1


def _ahead(events: list[tuple[str, int]], run: str) -> set[int]:
    """Return how many gathered units had not run yet when a unit ran, except for the first and last unit."""
    gathered: set[int] = set()
    ran: list[int] = []
    counts = []
    for kind, index in events:
        if kind == "all-gather":
            gathered.add(index)
        elif kind == run:
            ran.append(index)
            counts.append(len(gathered - {*ran}))
    return set(counts[1:-1])


def _gpt_loss(wrapped: nn.Module) -> Loss:
    tokens = torch.randint(VOCAB_SIZE, (2, 8), generator=torch.Generator().manual_seed(0))
    return lambda: wrapped(tokens[:, :-1], None, None, labels=tokens[:, 1:]).mean()


def _net_loss(net: nn.Module) -> Loss:
    return lambda: loss_of(net, global_batch(0, 1)[0])


def _check(loss: Loss, module: Any, gathers: bool, reductions: bool, strategy: str) -> None:
    forward, backward, overlaps = _seen(module, loss)
    assert overlaps is reductions, strategy
    assert forward == {int(gathers)}, (strategy, forward)
    if strategy == "optim_grads_params":  # other strategies gather nothing here
        assert backward == {int(gathers)}, (strategy, backward)


def _config(strategy: str, **fields: Any) -> DistributedDataParallelConfig:
    return DistributedDataParallelConfig(use_megatron_fsdp=True, data_parallel_sharding_strategy=strategy, **fields)  # type: ignore[arg-type]


@CHECKS.on(2)
def the_command_line_overlaps_by_the_strategy() -> None:
    for strategy, (gathers, reductions) in ALWAYS.items():
        flags = f"--use-megatron-fsdp --data-parallel-sharding-strategy {strategy}"
        for given, expected in (
            ("", (gathers, reductions)),
            ("--overlap-param-gather --overlap-grad-reduce", (True, True)),
            ("--no-overlap-param-gather", (False, reductions)),
            ("--no-overlap-grad-reduce", (gathers, False)),
        ):
            config = parse_settings(f"{TINY} {flags} {given}".split(), world_size=2).ddp
            model = build_gpt(num_layers=4)
            wrapped = FullyShardedDataParallel(model.config, config, model)
            _check(_gpt_loss(wrapped), wrapped.module, *expected, strategy)
            assert (config.overlap_param_gather, config.overlap_grad_reduce) == expected, (
                "the fields contain the values in effect"
            )


@CHECKS.on(2)
def the_adapter_overlaps_by_the_strategy_with_fields_at_megatrons_defaults() -> None:
    for strategy, expected in ALWAYS.items():
        model = build_gpt(num_layers=4)
        with TestCase().assertLogs("megatron.core.distributed.fsdp.adapter", "INFO") as logs:
            wrapped = FullyShardedDataParallel(model.config, _config(strategy), model)
        assert wrapped.ddp_config.describe_overlap() in logs.output[0]
        _check(_gpt_loss(wrapped), wrapped.module, *expected, strategy)


@CHECKS.on(2)
def megatron_fsdp_overlaps_by_the_strategy() -> None:
    """Also without a config. ``fully_shard_model`` overlaps by default; False as an argument turns it off."""
    for strategy, expected in ALWAYS.items():
        config = _config(strategy, overlap_param_gather=False, overlap_grad_reduce=False)
        net = make_net(4)
        _check(
            _net_loss(wrapped := MegatronFSDP(net, _index(), config, fsdp_unit_modules=[Block])),
            net,
            *expected,
            strategy,
        )
        assert (wrapped.ddp_config.overlap_param_gather, wrapped.ddp_config.overlap_grad_reduce) == expected
        for arguments, expected in (({}, (True, True)), (_OFF, (False, False))):
            net = make_net(4)
            wrapped = fully_shard_model(net, fsdp_unit_modules=[Block], zero_dp_strategy=strategy, **arguments)
            _check(_net_loss(wrapped), net, *expected, strategy)
    net = make_net(4)
    _check(_net_loss(MegatronFSDP(net, _index(), fsdp_unit_modules=[Block])), net, True, True, "optim_grads_params")


_OFF: dict[str, Any] = {"overlap_param_gather": False, "overlap_grad_reduce": False}


def _index() -> FSDPDistributedIndex:
    return FSDPDistributedIndex(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), dp_shard_dim="dp")


@CHECKS.on(2)
def fully_shard_overlaps_with_every_strategy() -> None:
    for strategy in STRATEGY_NAMES:
        net = shard_net(make_net(4), strategy)
        _check(_net_loss(net), net, True, True, strategy)


@CHECKS.on(4)
def under_hybrid_sharding_the_inner_strategy_decides() -> None:
    for strategy, expected in ALWAYS.items():
        for outer in ("no_shard", "optim") if strategy != "no_shard" else ("no_shard",):
            net = make_net(4)
            index = FSDPDistributedIndex(
                hybrid_mesh(),
                dp_shard_dim="inner",
                dp_outer_dim="outer",
                hybrid_fsdp_group=dist.group.WORLD,
                hsdp_outer_dp_shard=outer == "optim",
            )
            wrapped = MegatronFSDP(net, index, _config(strategy), fsdp_unit_modules=[Block])
            _check(_net_loss(wrapped), net, *expected, strategy)


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_overlap_by_default(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
