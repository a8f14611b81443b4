"""Work on different streams is ordered wherever it must be, by named edges alone; and it overlaps where it should.

The detector in ``tests/support/logging_streams`` sees every access of the engine to its buffers. That no edge is missing is a run
without races; that none is idle is a race in the same runs once its waits are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import megatron.core.distributed.fsdp
from megatron.core.distributed.fsdp import (
    FsdpParameterGroup,
    MixedPrecisionPolicy,
    fully_shard_optimizer,
    microbatch,
)
from megatron.core.distributed.fsdp.comm.streams import Edge
from megatron.core.distributed.fsdp.runtime.unsharder import Unsharder
from megatron.core.transformer.moe.alternating_passes import AlternatingPasses
from tests.support.logging_streams import LoggingStreams
from tests.support.models import STRATEGY_NAMES, Net, context_of, loss_of, make_net, my_piece, shard_net
from tests.support.rank_checks import RankChecks
from tests.support.turns import Turn
from tests.support.watched_schedule import watch_optimizer, watched_schedule

CHECKS = RankChecks(__name__)


class Run:
    """Trains a net whose streams are logged."""

    def __init__(
        self,
        streams: LoggingStreams,
        strategy: str = "optim_grads_params",
        num_blocks: int = 4,
        *,
        least_memory: bool | None = None,
    ) -> None:
        self.streams = streams
        net = make_net(num_blocks, dtype=torch.bfloat16)
        policy = MixedPrecisionPolicy()
        self.net: Net = shard_net(net, strategy, policy=policy, poisons=False, least_memory=least_memory)
        self.context = context_of(self.net)
        self.optimizer = fully_shard_optimizer(torch.optim.SGD(self.net.parameters(), lr=0.1))
        watch_optimizer(streams, self.optimizer, self.context.groups)

    def step(self, num_microbatches: int = 1) -> list[str]:
        """The log of one step."""
        begin = len(self.streams.log)
        for at in range(num_microbatches):
            with microbatch(self.net, is_first=at == 0, is_last=at == num_microbatches - 1):
                loss_of(self.net, my_piece(at)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.streams.log[begin:]

    def evaluate(self) -> None:
        with torch.no_grad():
            loss_of(self.net, my_piece(0))


def _steady(streams: LoggingStreams, strategy: str) -> None:
    run = Run(streams, strategy)
    for _ in range(4):
        run.step()


def _with_the_least_memory(streams: LoggingStreams, strategy: str) -> None:
    """Arenas are given back within a step, and compute uses their memory until they are taken again."""
    run = Run(streams, strategy, least_memory=True)
    for _ in range(4):
        run.step()
    run.step(2)


def _accumulating(streams: LoggingStreams, strategy: str) -> None:
    run = Run(streams, strategy)
    for _ in range(3):
        run.step(3)
    run.step(1)


def _gradients_kept(streams: LoggingStreams, strategy: str) -> None:
    """Main gradients are written by ``zero_grad(set_to_none=False)`` and added to."""
    run = Run(streams, strategy)
    for step in range(4):
        loss_of(run.net, my_piece(step)).backward()
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=False)
        flats = tuple(group.grads.main.storage.flat for group in run.context.groups)
        streams.work("zero", writes=flats)


def _evaluating(streams: LoggingStreams, strategy: str) -> None:
    run = Run(streams, strategy)
    for _ in range(3):
        run.step()
        run.evaluate()
        run.evaluate()
        run.context.prepare_forward()


def _disordered(streams: LoggingStreams, strategy: str) -> None:
    """Units that are gathered ahead and not used, that run twice, and that share addresses and meet."""
    run = Run(streams, strategy)
    for order in ([0, 1, 2, 3], [0, 1, 2, 3], [0, 2, 3], [3, 1, 3], [0], [], [0, 1, 2, 3], [2, 0, 2], [0, 1, 2, 3]):
        run.net.order = order
        run.step()


def _recomputing(streams: LoggingStreams, strategy: str) -> None:
    for use_reentrant in (True, False):
        run = Run(streams, strategy)
        run.net.around = lambda block, x, use=use_reentrant: checkpoint(block, x, use_reentrant=use)  # type: ignore[misc]
        for _ in range(3):
            run.step()


def _interleaved(streams: LoggingStreams, strategy: str) -> None:
    run = Run(streams, strategy)
    for _ in range(3):
        losses = [loss_of(run.net, my_piece(at)) for at in range(2)]
        for loss in losses:
            loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


def _step_with_turns(run: Run, num_microbatches: int) -> list[str]:
    """The log of a step in which each backward but the last takes turns with the next forward, within each block."""
    passes, begin, losses = AlternatingPasses(), len(run.streams.log), list[torch.Tensor]()
    turns = [
        block.up.register_forward_pre_hook(lambda _, args: (Turn.apply(args[0], passes),)) for block in run.net.blocks
    ]

    def forward(at: int) -> None:
        with microbatch(run.net, is_first=at == 0, is_last=False):
            losses.append(loss_of(run.net, my_piece(at)))
            passes.finish()

    def backward(at: int) -> None:
        with microbatch(run.net, is_first=False, is_last=at == num_microbatches - 1):
            losses.pop(0).backward()

    forward(0)
    for at in range(1, num_microbatches):
        passes.run(partial(forward, at), partial(backward, at - 1))
    backward(num_microbatches - 1)
    for turn in turns:
        turn.remove()
    run.optimizer.step()
    run.optimizer.zero_grad()
    return run.streams.log[begin:]


def _taking_turns(streams: LoggingStreams, strategy: str) -> None:
    for num_blocks in (3, 4):
        run = Run(streams, strategy, num_blocks)
        for _ in range(3):
            _step_with_turns(run, 3)
        run.step(2)


def _without_overlap(streams: LoggingStreams, strategy: str) -> None:
    run = Run(streams, strategy)
    run.context.change_options(overlaps_reductions=False)
    for unit in run.context.units:
        unit.change_options(forward_prefetch_depth=0, backward_prefetch_depth=0)
    for _ in range(3):
        run.step(2)


def _updating_beside_forward(streams: LoggingStreams, strategy: str) -> None:
    """Updates of a unit run while the units before it compute; then somebody reads the weights, as a checkpoint does."""
    run = Run(streams, strategy)
    groups = [group for group in run.context.groups if group.trainable]

    def update(group: FsdpParameterGroup) -> None:
        main, grad, piece = group.weights.main.local, group.grads.main.storage.flat, group.weights.piece_of_update
        main.add_(grad, alpha=-0.1)
        if piece is not None:
            piece.copy_(main)
        streams.work("update", reads=(grad,), writes=(main,) if piece is None else (main, piece))

    def step(closure: None = None) -> None:
        run.context.update_weights(groups, update, overlaps=True)

    run.optimizer.step = step  # type: ignore[method-assign]
    for _ in range(3):
        run.step()
    run.step(2)
    run.context.finish_updates()
    streams.work("read", reads=tuple(group.weights.main.local for group in groups))
    run.evaluate()


class _Peers:
    """Stands for ranks that read this one's shards until they have said, on the gather stream, that they are done."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def end_pass(self) -> None:
        shards = tuple(group.weights.model.local for group in self.run.context.groups)
        self.run.streams.work("peers read", reads=shards)


def _shards_that_peers_read(streams: LoggingStreams, strategy: str) -> None:
    """After an evaluation the user writes weights where others read them."""
    run = Run(streams, strategy)
    run.step()
    run.context.registry.read_peers = [_Peers(run)]  # type: ignore[list-item]
    for _ in range(2):
        run.evaluate()
        streams.work("load", writes=tuple(group.weights.model.local for group in run.context.groups))
        run.context.weights_changed()


def _roots_in_turn(streams: LoggingStreams, strategy: str) -> None:
    """Blocks without a common root are prefetched; meanwhile the user writes weights of the next block."""
    run = Run(streams, strategy)
    written = [group for group in run.context.groups if group.prefix.startswith("blocks.2.")]
    for step in range(5):
        x = torch.ones(2, 7, dtype=torch.bfloat16)
        for at, block in enumerate(run.net.blocks):
            x = block(x)
            if at == 1 and step > 2:
                for group in written:
                    group.weights.main.local.mul_(0.5)
                streams.work("write", writes=tuple(group.weights.main.local for group in written))
        x.float().square().mean().backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


# Those that alone need some edge come first, since runs without an edge end at the first race.
SCENARIOS: list[Callable[[LoggingStreams, str], None]] = [
    _updating_beside_forward,
    _shards_that_peers_read,
    _disordered,
    _with_the_least_memory,
    _steady,
    _accumulating,
    _gradients_kept,
    _evaluating,
    _recomputing,
    _interleaved,
    _taking_turns,
    _without_overlap,
    _roots_in_turn,
]


def _races(dropped: Edge | None = None) -> tuple[list[str], dict[Edge, int]]:
    """The races of all scenarios and strategies, and how often each edge was waited for."""
    races: list[str] = []
    edges: dict[Edge, int] = dict.fromkeys(Edge, 0)
    for scenario in SCENARIOS:
        for strategy in STRATEGY_NAMES if dropped is None else ("optim", "optim_grads_params"):
            with watched_schedule(LoggingStreams(dropped)) as streams:
                scenario(streams, strategy)
            races += [f"{scenario.__name__} {strategy}: {race}" for race in streams.races]
            for edge, count in streams.edges.items():
                edges[edge] += count
            if dropped is not None and races:
                return races, edges
    return races, edges


@CHECKS.on(2)
def nothing_races_and_every_edge_occurs() -> None:
    races, edges = _races()
    assert not races, "\n".join(races[:20])
    assert all(edges.values()), edges


@CHECKS.on(1)
def nothing_races_where_backward_writes_main_gradients() -> None:
    """No other rank shares a weight: the reduce stream has nothing to wait for, and compute waits for no reduction."""
    races, edges = _races()
    assert not races, "\n".join(races[:20])
    assert not any(edges[edge] for edge in (Edge.GRADS_WRITTEN, Edge.INPUT_REDUCED)), edges
    assert edges[Edge.UNIT_UPDATED] > 0, "updates run during the forward"


@CHECKS.on(2)
def nothing_races_in_steady_steps() -> None:
    """Two scenarios alone, for faults that are planted one after the other."""
    for scenario in (_steady, _with_the_least_memory):
        with watched_schedule(LoggingStreams()) as streams:
            scenario(streams, "optim_grads_params")
        assert not streams.races, "\n".join(streams.races[:20])


@CHECKS.on(2)
def every_edge_is_needed() -> None:
    """Its waits dropped, something would be read before it is written, or written before it is read."""
    idle = [edge.name for edge in Edge if not _races(edge)[0]]
    assert not idle, idle


@CHECKS.on(2)
def each_gather_is_issued_before_the_previous_units_compute() -> None:
    """In both directions: with n units in a chain, n - 1 gathers are ahead in forward, and n - 1 in backward.

    The last unit stays gathered from forward to backward, and the root throughout.
    """
    with watched_schedule(LoggingStreams()) as streams:
        run = Run(streams)
        for _ in range(3):
            run.step()
        log = [entry for entry in run.step() if re.match("gather|forward|backward|reduce", entry)]
    assert log == [
        *("gather root", "forward root", "gather 0", "forward 0", "gather 1", "forward 1", "gather 2"),
        *("forward 2", "gather 3", "forward 3"),
        *("backward root", "backward 3", "gather 2", "reduce 3", "backward 2", "gather 1"),
        *("reduce 2", "backward 1", "gather 0", "reduce 1", "backward 0", "reduce 0", "reduce root"),
    ], log


@CHECKS.on(2)
def passes_that_take_turns_reduce_as_if_each_ran_by_itself() -> None:
    """Each unit when the backward of the next one begins. A unit that both passes use at once is gathered once."""
    for num_blocks in (3, 4):  # with an odd number both passes are in the block in the middle at once
        with watched_schedule(LoggingStreams()) as streams:
            run = Run(streams, num_blocks=num_blocks)
            for _ in range(3):
                _step_with_turns(run, 3)
            log = _step_with_turns(run, 3)
        of_backwards = [entry for entry in log if re.match("backward|reduce", entry)]
        last = num_blocks - 1
        inner = [entry for at in range(last, 0, -1) for entry in (f"reduce {at}", f"backward {at - 1}")]
        own = ["backward root", f"backward {last}", *inner, "reduce 0", "reduce root"]
        assert of_backwards == own * 3, of_backwards
        ends = log.index(f"forward {last}")  # of the first forward, which runs by itself
        assert log.index(f"backward {last}") < log.index(f"forward {last}", ends + 1), "they took turns"


@CHECKS.on(2)
def compute_waits_once_for_each_gather_and_once_for_all_reductions() -> None:
    """And waits of compute for a range are for the unit before last: the last one's reduction is still running."""
    with watched_schedule(LoggingStreams()) as streams:
        run = Run(streams)
        for _ in range(3):
            run.step()
        log = run.step()
    assert log.count("wait WEIGHTS_GATHERED") == sum(entry.startswith("gather") for entry in log) == 8
    assert log.count("wait GRADS_REDUCED") == 1
    assert log.count("wait GRADS_WRITTEN") == 5
    assert log.count("wait INPUT_REDUCED") == 2
    assert log.count("wait WEIGHTS_UPDATED") == 1
    assert log.index("wait WEIGHTS_UPDATED") < log.index("gather root")
    assert not log.count("wait REDUCE_BEFORE_FREE") and not log.count("wait GATHER_BEFORE_FREE")


@CHECKS.on(2)
def never_more_than_two_units_are_gathered_beside_their_root() -> None:
    """The one that computes and the one that is on its way; and the arena has no room for more."""
    alive: list[int] = []
    prefetch = Unsharder.prefetch

    def counted(unsharder: Unsharder, group: FsdpParameterGroup, *, forward: bool) -> None:
        prefetch(unsharder, group, forward=forward)
        alive.append(len({other.prefix for other in unsharder.live if other.prefix}))

    with watched_schedule(LoggingStreams()) as streams:
        run = Run(streams, num_blocks=6)
        for _ in range(3):
            run.step(2)
        with patch.object(Unsharder, "prefetch", counted):
            run.step(2)
    assert max(alive) == 2
    assert run.context.planner.plan is not None
    nbytes = {False: 0, True: 0}  # of the root's weights, and of the largest unit's
    for unit in run.context.units:
        own = sum(
            _aligned(group.weights.full_storage.nbytes)
            for group in unit.own_groups
            if group.weights.full_storage is not None
        )
        nbytes[bool(unit.prefix)] = max(nbytes[bool(unit.prefix)], own)
    assert run.context.planner.plan.weights.nbytes <= nbytes[False] + 2 * nbytes[True]


def _aligned(nbytes: int) -> int:
    """Ranges of an arena begin at multiples of 512 bytes."""
    return -(-nbytes // 512) * 512


def test_the_table_of_edges_is_that_of_the_code() -> None:
    """SCHEDULE.md explains each edge with the same producer, consumer and hazard, and no other."""
    text = (Path(megatron.core.distributed.fsdp.__file__).parent / "SCHEDULE.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", text, flags=re.MULTILINE)
    table = {name: (producer.strip(), consumer.strip(), hazard.strip()) for name, producer, consumer, hazard, _ in rows}
    assert table == {edge.name: edge.value for edge in Edge}
    assert len(rows) == len(Edge) and all(buffer.strip() for *_, buffer in rows)


def test_edges_are_distinct() -> None:
    """UnitRegistry of an Enum with equal values would be one member under two names."""
    assert len(Edge) == len(Edge.__members__) == 12


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_schedule(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
