"""Strategies are tables of placements, and a table that cannot work is refused when it is made."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard

from megatron.core.distributed.fsdp.config.placement import STRATEGIES, Placements, strategy_placements

R, S, AVG, SUM = Replicate(), Shard(0), Partial("avg"), Partial("sum")


def test_the_four_strategies() -> None:
    tables = {
        name: (p.parameter, p.gradient, p.optimizer) for name in STRATEGIES for p in [strategy_placements(name, "dp")]
    }
    assert tables == {
        "no_shard": ((R,), (AVG,), (R,)),
        "optim": ((R,), (AVG,), (S,)),
        "optim_grads": ((R,), (S,), (S,)),
        "optim_grads_params": ((S,), (S,), (S,)),
    }
    assert strategy_placements("optim").dp_axes == (0,)
    with pytest.raises(ValueError, match=r"must be one of no_shard, optim, .*got 'full'"):
        strategy_placements("full")


def test_lists_are_taken_and_kept_as_tuples() -> None:
    placements = Placements([0], [R], [SUM], [S])
    assert placements == Placements((0,), (R,), (SUM,), (S,)) and hash(placements) is not None


def test_hybrid_tables_are_lawful() -> None:
    """The engine does not serve them yet; the table does not stand in their way."""
    Placements(("outer", "inner"), [R, S], [AVG, S], [R, S])
    Placements(("outer", "inner"), [R, S], [AVG, S], [S, S])


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (((), (), (), ()), ValueError, "one placement per data-parallel axis"),
        (((0,), (R,), (AVG, AVG), (R,)), ValueError, r"each kind, got \{'dp_axes': 1, .*'gradient': 2"),
        (((0,), (AVG,), (AVG,), (R,)), TypeError, r"parameter placement of axis 0 must be Replicate\(\) or Shard\(0\)"),
        (((0,), (Shard(1),), (S,), (S,)), TypeError, r"parameter placement of axis 0 .* got S\(1\)|Shard\(dim=1\)"),
        (((0,), (R,), (AVG,), (AVG,)), TypeError, "optimizer placement of axis 0"),
        (((0,), (R,), (R,), (R,)), TypeError, r'gradient placement of axis 0 .*use Partial\("avg"\) with optimizer'),
        (((0,), (R,), (Partial("max"),), (R,)), TypeError, "gradient placement of axis 0"),
        (((0,), (S,), (AVG,), (S,)), ValueError, "axis 0: a sharded parameter needs a sharded gradient"),
        (((0,), (R,), (S,), (R,)), ValueError, "axis 0: a sharded gradient needs sharded optimizer state"),
        (((0, 1), (R, S), (AVG, S), (R, R)), ValueError, "axis 1: a sharded gradient needs"),
    ],
)
def test_tables_that_cannot_work(arguments: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        Placements(*arguments)


def test_what_has_no_rows_is_replicated() -> None:
    assert strategy_placements("optim_grads_params").replicated() == Placements((0,), (R,), (AVG,), (R,))
    assert Placements((0,), (R,), (SUM,), (S,)).replicated() == Placements((0,), (R,), (SUM,), (R,))


def test_what_is_frozen_rests_where_its_parameter_does() -> None:
    assert strategy_placements("optim").frozen() == Placements((0,), (R,), (AVG,), (R,))
    assert strategy_placements("optim_grads_params").frozen() == strategy_placements("optim_grads_params")
