"""Marks for profilers: each sync, gather, reduction and phase is marked with its unit's name, and every mark ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.core.distributed.fsdp import MixedPrecisionPolicy, fully_shard_optimizer, microbatch
from megatron.core.distributed.fsdp.runtime import nvtx as ranges
from tests.support.models import Net, context_of, global_batch, loss_of, make_net, my_piece, shard_net
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)
UNITS = ("root", "blocks.0", "blocks.1", "blocks.2")


@dataclass
class Marks:
    """Stands in for a profiler.

    Attributes:
        log: acts and phases in the order of their beginnings, nested acts joined by " > ".
        acts: acts that are under way, outermost first.
        phases: phases that are under way, by the mark that ends them.
    """

    log: list[str] = field(default_factory=list)
    acts: list[str] = field(default_factory=list)
    phases: dict[int, str] = field(default_factory=dict)
    num_phases: int = 0

    def push(self, name: str) -> None:
        self.acts.append(name)
        self.log.append(" > ".join(self.acts))

    def pop(self) -> None:
        self.acts.pop()

    def begin(self, name: str) -> int:
        self.num_phases += 1
        self.phases[self.num_phases] = name
        self.log.append(name)
        return self.num_phases

    def end(self, mark: int) -> None:
        del self.phases[mark]


@contextmanager
def _marked() -> Iterator[Marks]:
    marks = Marks()
    with ExitStack() as patches:
        for name in ("push", "pop", "begin", "end"):
            patches.enter_context(patch.object(ranges, name, getattr(marks, name)))
        yield marks
    assert not marks.acts, "each act that was pushed is popped"
    assert not marks.phases, "each phase that was begun is ended, once"


def _steady_net(strategy: str = "optim_grads_params") -> tuple[Net, torch.optim.Optimizer]:
    net = shard_net(make_net(3, dtype=torch.bfloat16), strategy, policy=MixedPrecisionPolicy())
    optimizer = fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    for _ in range(3):
        _step(net, optimizer)
    return net, optimizer


def _step(net: Net, optimizer: torch.optim.Optimizer, num_microbatches: int = 1) -> None:
    for at, piece in enumerate(global_batch(0, num_microbatches)):
        with microbatch(net, is_first=at == 0, is_last=at == num_microbatches - 1):
            loss_of(net, piece).backward()
    optimizer.step()
    optimizer.zero_grad()


@CHECKS.on(2)
def each_act_and_phase_is_marked_with_its_units_name() -> None:
    net, optimizer = _steady_net()
    with _marked() as marks:
        _step(net, optimizer)
    seen = Counter(entry.rpartition(" > ")[2] for entry in marks.log)
    expected = Counter({f"fsdp.{act} {unit}": 1 for act in ("sync", "reduce", "forward", "backward") for unit in UNITS})
    # The last unit and the root stay gathered from forward to backward.
    expected += Counter({f"fsdp.gather {unit}": 2 if unit in UNITS[1:-1] else 1 for unit in UNITS})
    assert seen == expected
    assert "fsdp.forward root > fsdp.forward blocks.0 > fsdp.gather blocks.1 > fsdp.sync blocks.1" in marks.log


@CHECKS.on(2)
def later_microbatches_have_no_marks_of_syncs() -> None:
    net, optimizer = _steady_net("optim")
    with _marked() as marks:
        _step(net, optimizer, num_microbatches=3)
    seen = Counter(entry.rpartition(" > ")[2] for entry in marks.log)
    for unit in UNITS:
        assert seen[f"fsdp.sync {unit}"] == 1
        assert seen[f"fsdp.forward {unit}"] == seen[f"fsdp.backward {unit}"] == 3
        assert seen[f"fsdp.reduce {unit}"] == 1, "what microbatches sum up on this rank is reduced once"


def _trip(*_: object) -> None:
    raise ValueError("trips")


@CHECKS.on(2)
def marks_end_when_forward_fails() -> None:
    net, optimizer = _steady_net()
    with _marked() as marks:
        hook = net.blocks[1].register_forward_pre_hook(_trip)
        with pytest.raises(ValueError, match="trips"):
            loss_of(net, my_piece(0))
        assert not marks.acts
        hook.remove()
        _step(net, optimizer)


@CHECKS.on(2)
def marks_end_when_backward_fails() -> None:
    """The next forward notices it."""
    net, optimizer = _steady_net()
    with _marked():
        hook = net.blocks[1].register_forward_hook(_trip_in_backward)
        with pytest.raises(ValueError, match="trips"):
            loss_of(net, my_piece(0)).backward()
        hook.remove()
        optimizer.zero_grad()
        _step(net, optimizer)
    assert not context_of(net).unsharder.live


def _trip_in_backward(module: Any, args: Any, output: torch.Tensor) -> None:
    output.register_hook(_trip)


@CHECKS.on(2)
def evaluation_is_marked_as_forward_alone() -> None:
    net, _ = _steady_net()
    with _marked() as marks, torch.no_grad():
        loss_of(net, my_piece(0))
    kinds = {entry.rpartition(" > ")[2].split()[0] for entry in marks.log}
    assert kinds == {"fsdp.forward", "fsdp.gather", "fsdp.sync"}


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_ranges(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
