"""What the engine costs the host is held: calls and lines per unit and phase, and that no loop runs over parameters.

``python -m benchmarks.host_cost`` prints the same figures, by function. The bounds are what was reached; who makes the engine
cheaper lowers them here, and who makes it dearer sees red. The interpreter counts; no time is measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import host_cost
from benchmarks.host_cost import count, rank_of_two
from benchmarks.measure.host_counts import PHASES, Counts
from megatron.core.distributed.fsdp import fully_shard
from megatron.core.distributed.fsdp.config.placement import STRATEGIES
from megatron.core.distributed.fsdp.runtime.grad_reducer import MissingGradients

UNITS, PARAMETERS, MORE_PARAMETERS = 8, 4, 40
KINDS = ("calls", "builtins", "lines", "events", "waits")


@dataclass(frozen=True)
class Bounds:
    """At most so much, in one phase of a step of the steady state (ZeRO-3, one group a unit, an SGD of PyTorch).

    Attributes:
        calls: Python functions of the engine that a further unit calls.
        builtins: functions in C that the engine calls for a further unit.
        lines: lines of the engine that run for a further unit of 4 parameters, with ``UNITS`` others.
        events: events that a further unit records.
        waits: waits for events that a further unit adds.
        calls_per_parameter: Python functions of the engine that a further parameter of a unit calls.
        lines_per_parameter: lines of the engine that a further parameter of a unit adds.
        lines_per_other_unit: lines by which each unit gets dearer for each other one that there is.
    """

    calls: int
    builtins: int
    lines: int
    events: int
    waits: int
    calls_per_parameter: float
    lines_per_parameter: float
    lines_per_other_unit: float


# The aim is 0 in the last three columns, but for the operations of PyTorch's optimizer; autograd tells of each gradient by a call.
# Measured with torch 2.11, where each collective returns a Work to wait for; 2.13 needs a few lines and C calls less.
_BUILTINS = 18 if hasattr(torch.distributed.ProcessGroup, "all_gather_single") else 21
BOUNDS = {
    #                 calls builtins lines events waits  per parameter: calls, lines  per other unit: lines
    "forward": Bounds(31, _BUILTINS, 176, 2, 2, 0.0, 0.0, 0.0),
    "backward": Bounds(52, 39, 263, 4, 4, 1.0, 2.0, 0.0),
    # One operation of SGD for each parameter, which runs in Python: in as much time as in torch's own code for DTensors.
    "step": Bounds(12, 40, 109, 0, 0, 2.0, 22.0, 0.0),
}


@pytest.fixture(scope="module")
def sizes() -> Iterator[dict[tuple[int, int], Counts]]:
    """Counts by (units, parameters of each)."""
    with rank_of_two(torch.device("cpu")):
        yield {
            (units, parameters): count(num_units=units, num_parameters=parameters)
            for units, parameters in (
                (UNITS, PARAMETERS),
                (2 * UNITS, PARAMETERS),
                (3 * UNITS, PARAMETERS),
                (UNITS, MORE_PARAMETERS),
            )
        }


def _total(counts: Counts, kind: str, phase: str) -> int:
    """What the engine did in the phase, without the placements of DTensors that PyTorch's optimizer looks at."""
    total: int = getattr(counts, kind)[phase]
    by_function: Counter[tuple[str, str]] = {"calls": counts.by_function, "lines": counts.lines_by_function}.get(
        kind, Counter()
    )
    return total - sum(number for (when, name), number in by_function.items() if when == phase and "_shard." in name)


def _per_unit(sizes: dict[tuple[int, int], Counts], kind: str, phase: str) -> float:
    few, many = (_total(sizes[units, PARAMETERS], kind, phase) for units in (UNITS, 2 * UNITS))
    return (many - few) / UNITS


def _per_parameter(sizes: dict[tuple[int, int], Counts], kind: str, phase: str) -> float:
    few, many = (_total(sizes[UNITS, parameters], kind, phase) for parameters in (PARAMETERS, MORE_PARAMETERS))
    return (many - few) / (UNITS * (MORE_PARAMETERS - PARAMETERS))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("phase", PHASES)
def test_a_unit_costs_the_host_no_more_than_it_did(sizes: dict[tuple[int, int], Counts], phase: str, kind: str) -> None:
    cost, bound = _per_unit(sizes, kind, phase), getattr(BOUNDS[phase], kind)
    assert cost <= bound, f"{kind} in {phase} for a further unit"


@pytest.mark.parametrize("kind", ["calls", "lines"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_parameter_costs_the_host_no_more_than_it_did(
    sizes: dict[tuple[int, int], Counts], phase: str, kind: str
) -> None:
    """Whatever a loop over parameters does between forward and step can be done once for a list made beforehand."""
    cost, bound = _per_parameter(sizes, kind, phase), getattr(BOUNDS[phase], f"{kind}_per_parameter")
    assert cost <= bound, f"{kind} in {phase} for a further parameter"


@pytest.mark.parametrize("phase", PHASES)
def test_a_unit_gets_no_dearer_for_the_others_than_it_did(sizes: dict[tuple[int, int], Counts], phase: str) -> None:
    """A loop over other units in what each unit does would make a step quadratic."""
    one, two, three = (_total(sizes[number * UNITS, PARAMETERS], "lines", phase) for number in (1, 2, 3))
    # n units that each pay for n others: the second difference over equal steps s is 2 s^2 times that price.
    assert ((three - two) - (two - one)) / (2 * UNITS**2) <= BOUNDS[phase].lines_per_other_unit


def test_each_unit_gathers_twice_and_reduces_once_in_a_step(sizes: dict[tuple[int, int], Counts]) -> None:
    assert [_per_unit(sizes, "collectives", phase) for phase in PHASES] == [1, 2, 0]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_asking_for_missing_gradients_costs_a_collective_and_an_event_a_step(
    sizes: dict[tuple[int, int], Counts], monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    """However many units there are; and nothing where there is nobody to ask."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("both", "alone"))["both" if num_ranks == 2 else "alone"]
    monkeypatch.setattr(host_cost, "fully_shard", partial(fully_shard, mesh=mesh))
    with_question = count(num_units=4, num_parameters=2)
    monkeypatch.setattr(MissingGradients, "ask", lambda self: None)
    without = count(num_units=4, num_parameters=2)
    for kind in ("collectives", "events", "kernels"):
        asked = getattr(with_question, kind)["backward"] - getattr(without, kind)["backward"]
        assert asked == (1 if num_ranks == 2 else 0), kind


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_operator_runs_on_a_dtensor_between_forward_and_step(
    sizes: dict[tuple[int, int], Counts], strategy: str
) -> None:
    """Each costs tens of microseconds; the optimizer's own are what is left."""
    counts = count(num_units=2, num_parameters=2, strategy=strategy)
    assert counts.dtensor_ops["forward"] == counts.dtensor_ops["backward"] == 0
    assert counts.dtensor_ops["step"] > 0, "the counter sees them"
