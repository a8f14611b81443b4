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
        log: operations and passes of units in the order in which they begin; nested names are joined by " > ".
        open: the currently open ranges, outermost first.
    """

    log: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)

    def push(self, name: str) -> None:
        self.open.append(name)
        self.log.append(" > ".join(self.open))

    def pop(self) -> None:
        self.open.pop()


@contextmanager
def _marked() -> Iterator[Marks]:
    marks = Marks()
    with ExitStack() as patches:
        for names, function in ((("push", "enter", "begin"), marks.push), (("pop", "leave", "end"), marks.pop)):
            for name in names:
                patches.enter_context(patch.object(ranges, name, function))
        yield marks
    assert not marks.open, "each range that was pushed is popped"


def _of(unit: str, phase: str) -> str:
    return f"MFSDP {'<root>' if unit == 'root' else unit} {phase}"


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
    expected = Counter({f"fsdp.{act} {unit}": 1 for act in ("sync", "reduce") for unit in UNITS})
    expected += Counter({_of(unit, phase): 1 for phase in ("forward", "backward") for unit in UNITS})
    # The last unit and the root stay gathered from forward to backward.
    expected += Counter({f"fsdp.gather {unit}": 2 if unit in UNITS[1:-1] else 1 for unit in UNITS})
    assert seen == expected
    root, first = _of("root", "forward"), _of("blocks.0", "forward")
    assert f"{root} > {first} > fsdp.gather blocks.1 > fsdp.sync blocks.1" in marks.log


@CHECKS.on(2)
def later_microbatches_have_no_marks_of_syncs() -> None:
    net, optimizer = _steady_net("optim")
    with _marked() as marks:
        _step(net, optimizer, num_microbatches=3)
    seen = Counter(entry.rpartition(" > ")[2] for entry in marks.log)
    for unit in UNITS:
        assert seen[f"fsdp.sync {unit}"] == 1
        assert seen[_of(unit, "forward")] == seen[_of(unit, "backward")] == 3
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
        assert not marks.open
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
    entries = [entry.rpartition(" > ")[2].split() for entry in marks.log]
    assert {entry[0] for entry in entries} == {"MFSDP", "fsdp.gather", "fsdp.sync"}
    assert {entry[-1] for entry in entries if entry[0] == "MFSDP"} == {"forward"}


@CHECKS.on(2)
def ranges_of_units_go_through_what_torch_has() -> None:
    """A tool that patches ``torch.cuda.nvtx`` gets the ranges, as with Megatron-FSDP, and they nest."""
    net, optimizer = _steady_net()
    marks = Marks()
    with ExitStack() as patches:
        for name, function in (("range_push", marks.push), ("range_pop", marks.pop)):
            patches.enter_context(patch.object(torch.cuda.nvtx, name, function))
        _step(net, optimizer)
        groups: Any = net._fsdp_groups
        groups[0].sync_model_weight_from_main_weight()
    assert not marks.open
    passes = [entry for entry in marks.log if not entry.endswith("weight")]
    for phase, blocks in (("forward", UNITS[1:]), ("backward", UNITS[:0:-1])):
        root = _of("root", phase)
        assert passes[: len(UNITS)] == [root, *(f"{root} > {_of(unit, phase)}" for unit in blocks)]
        del passes[: len(UNITS)]
    assert not passes
    assert marks.log[-1] == "MFSDP <root> sync_model_weight_from_main_weight"
    _step(net, optimizer)
    assert ranges.enter is ranges.push and len(marks.log) == 2 * len(UNITS) + 1, "the original functions are restored"


@CHECKS.on(2)
def ranges_of_backwards_that_overlap_are_balanced() -> None:
    """Partly frozen units keep their weights while the next units run backward."""
    net = make_net(3)
    for block in net.blocks.children():
        next(block.parameters()).requires_grad_(False)
    shard_net(net, "optim_grads_params")
    with _marked() as marks:
        loss_of(net, my_piece(0)).backward()
    seen = Counter(entry.rpartition(" > ")[2] for entry in marks.log)
    assert [seen[_of(unit, "backward")] for unit in UNITS] == [1] * len(UNITS)


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_ranges(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
