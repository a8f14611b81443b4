"""What ``transport="auto"`` measures, which transport it chooses by that, and what it prints."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp import fastest_transport
from megatron.core.distributed.fsdp.comm.process_group import RankOrderTransport
from megatron.core.distributed.fsdp.fastest_transport import Figures, cheapest, describe, sizes_to_measure
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)
CPU = torch.device("cpu")
MIB = 2**20


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _figures(ms: float, factor: float) -> Figures:
    return Figures((ms / 2,), (ms / 2,), factor)


def test_the_cheapest_counts_what_gemms_lose() -> None:
    """The figures of 4 x H200: nearly the same speed, and copies leave the GEMMs alone."""
    figures = {"nccl": _figures(3.0, 1.33), "symm": _figures(2.8, 1.26), "peer_copy": _figures(2.9, 1.12)}
    assert cheapest(figures) == "peer_copy"
    assert cheapest({**figures, "peer_copy": _figures(4.0, 1.12)}) == "symm"
    assert cheapest({"nccl": _figures(1.0, 1.3)}) == "nccl"


def test_what_is_hardly_better_is_not_chosen() -> None:
    assert cheapest({"nccl": _figures(1.0, 1.0), "symm": _figures(0.98, 1.0)}) == "nccl"
    assert cheapest({"nccl": _figures(1.0, 1.0), "symm": _figures(0.96, 1.0)}) == "symm"


def test_sizes_are_what_is_wanted_and_fits() -> None:
    plenty = 100 * 2**30
    assert sizes_to_measure([], plenty) == [8 * MIB, 128 * MIB]
    assert sizes_to_measure([436 * MIB, 1000], plenty) == [MIB, 436 * MIB]
    assert sizes_to_measure([2**40, 2**41], plenty) == [512 * MIB]
    assert sizes_to_measure([100 * MIB], 160 * MIB) == [20 * MIB]
    assert sizes_to_measure([100 * MIB], 0) == [MIB]


def test_the_line_has_the_figures_of_all() -> None:
    figures = {"nccl": Figures((0.1, 1.5), (0.1, 1.5), 1.33), "peer_copy": Figures((0.1, 1.4), (0.1, 1.6), 1.12)}
    assert describe(figures, [8 * MIB, 436 * MIB]) == (
        "gather / reduction of 8 and 436 MiB: peer_copy 0.10 and 1.40 / 0.10 and 1.60 ms, GEMMs x 1.12, cost 3.58; "
        "nccl 0.10 and 1.50 / 0.10 and 1.50 ms, GEMMs x 1.33, cost 4.26"
    )


@CHECKS.on(2)
def ranks_agree_on_figures_that_they_measured_differently() -> None:
    rank = dist.get_rank()
    calls = {"gather": 0, "reduce": 0}

    class Counting(RankOrderTransport):
        def all_gather(self, *arguments: Any) -> None:
            calls["gather"] += 1
            super().all_gather(*arguments)

    times = iter([1.0 + rank, 4.0, 2.0 - rank, 3.0, 40.0 + 2 * rank])
    rounds: list[int] = []
    with (
        patch.object(fastest_transport, "_time_ms", lambda call, repeats: (call(), next(times))[1]),
        patch.object(
            fastest_transport,
            "_concurrent_ms",
            lambda calls, multiply: (rounds.append(len(calls) // 2), 50.0 - rank)[1],
        ),
    ):
        figures = fastest_transport._measure_one(
            Counting(_world(), _world()), _world(), CPU, [1000, 4000], lambda: None
        )
    assert figures == Figures((2.0, 4.0), (2.0, 3.0), 50.0 / 42.0) and calls["gather"] == 2
    assert rounds == [9], "1.5 times 42 ms of GEMMs are covered by 9 rounds of 7 ms"


@CHECKS.on(2)
def the_choice_is_printed_once_with_the_reasons() -> None:
    figures = {"nccl": _figures(3.0, 1.33), "peer_copy": _figures(2.9, 1.12)}
    asked: list[Any] = []

    def measured(kinds: Any, group: Any, gather_group: Any, device: Any, sizes: Any) -> Any:
        asked.append((kinds, sizes))
        return figures, {}, [8 * MIB], 0.25

    line = _choose_with(measured, {"symm": "no NVLink", "peer_copy": None}, "peer_copy")
    assert asked == [(["nccl", "peer_copy"], [5])]
    expected = (
        f"fsdp transport: peer_copy between 2 ranks; {describe(figures, [8 * MIB])}; measured in 0.2 s; "
        "symm cannot serve: no NVLink\n"
    )
    assert line == (expected if dist.get_rank() == 0 else "")
    line = _choose_with(None, {"symm": "no NVLink", "peer_copy": "two hosts"}, "nccl")
    expected = "fsdp transport: nccl between 2 ranks; symm cannot serve: no NVLink; peer_copy cannot serve: two hosts\n"
    assert line == (expected if dist.get_rank() == 0 else "")
    torch.use_deterministic_algorithms(True)
    try:
        line = _choose_with(None, {"symm": None, "peer_copy": None}, "peer_copy")
    finally:
        torch.use_deterministic_algorithms(False)
    assert ("not measured, since deterministic" in line) == (dist.get_rank() == 0)


def _choose_with(measured: Callable[..., Any] | None, problems: dict[str, str | None], expected: str) -> str:
    """What is printed when ``expected`` is chosen by these measurements, or without any."""
    with (
        patch.object(fastest_transport, "measure", measured),
        patch.object(fastest_transport, "transport_problem", lambda kind, group, device: problems.get(kind)),
        redirect_stdout(io.StringIO()) as printed,
    ):
        assert fastest_transport.fastest_transport(_world(), _world(), CPU, [5]) == expected
    return printed.getvalue()


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
