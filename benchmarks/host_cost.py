"""Measure the engine's cost on the host: microseconds by unit and phase, Python calls and lines, operators, waits.

    python -m benchmarks.host_cost [--units 24] [--parameters 4] [--device cpu|cuda] [--json FILE]

On the CPU one process plays a rank of two with torch's fake process group, whose collectives return at once, so that
only the host's own work is seen. On GPUs NCCL runs: under torchrun with its ranks, else with one rank, which copies
where others communicate. Units are tiny, and figures are differences from the same model unsharded.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.measure.host_counts import PHASES, Counts, Tally
from megatron.core.distributed.fsdp import fully_shard, fully_shard_optimizer
from megatron.core.distributed.fsdp.api.module import find_context
from megatron.core.distributed.fsdp.comm.process_group import ProcessGroupTransport, RankOrderTransport
from megatron.core.distributed.fsdp.config.placement import STRATEGIES, strategy_placements

WIDTH = 8
# The first step is recorded, the second follows the plan for the first time; what comes later is alike.
NUM_WARMUP = 4
_COUNTED = [f.name for f in fields(Counts) if not f.name.endswith("by_function")]


class Unit(nn.Module):
    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.eye(WIDTH) for _ in range(num_parameters))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x @ weight
        return x


class Units(nn.Module):
    """A root with one parameter of its own around a chain of units."""

    def __init__(self, num_units: int, num_parameters: int) -> None:
        super().__init__()
        self.entry = nn.Parameter(torch.eye(WIDTH))
        self.units = nn.ModuleList(Unit(num_parameters) for _ in range(num_units))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.entry
        for unit in self.units:
            x = unit(x)
        return x


class Trainer:
    """A model with its optimizer, and a step that reports each phase as it begins."""

    def __init__(
        self, *, num_units: int, num_parameters: int, device: torch.device, strategy: str | None, tally: Tally
    ) -> None:
        net = Units(num_units, num_parameters).to(device, torch.bfloat16)
        optimizer = torch.optim.SGD
        if strategy is None:
            self.optimizer: torch.optim.Optimizer = optimizer(net.parameters(), lr=1e-3)
        else:
            with tally.streams():
                for unit in (*net.units, net):
                    fully_shard(unit, placements=strategy_placements(strategy))
                find_context(net)  # type: ignore[arg-type]
            self.optimizer = fully_shard_optimizer(optimizer(net.parameters(), lr=1e-3))
        self.net = net
        self.inputs = torch.ones(2, WIDTH, dtype=torch.bfloat16, device=device)

    def step(self, begin: Callable[[str], None]) -> None:
        begin("forward")
        loss = self.net(self.inputs).sum()
        begin("backward")
        loss.backward()
        begin("step")
        self.optimizer.step()
        self.optimizer.zero_grad()
        begin("none")


def count(
    *,
    num_units: int,
    num_parameters: int,
    device: torch.device | None = None,
    strategy: str | None = "optim_grads_params",
    num_warmup: int = NUM_WARMUP,
) -> Counts:
    """Count what the host does in one step of the steady state; ``strategy`` None is the unsharded model."""
    tally = Tally()
    trainer = Trainer(
        num_units=num_units,
        num_parameters=num_parameters,
        device=device or torch.device("cpu"),
        strategy=strategy,
        tally=tally,
    )
    for _ in range(num_warmup):
        trainer.step(tally.begin)
    tally.counts.events.clear()
    tally.counts.waits.clear()
    with tally.operators():
        trainer.step(tally.begin)
    events, waits = tally.counts.events.copy(), tally.counts.waits.copy()
    with tally.calls():
        trainer.step(tally.begin)
    with tally.lines():
        trainer.step(tally.begin)
    if trainer.inputs.is_cuda:
        tally.count_launches(trainer.step)
    tally.counts.events, tally.counts.waits = events, waits
    return tally.counts


def time_phases(trainers: list[Trainer], *, num_steps: int, device: torch.device) -> list[dict[str, float]]:
    """Time the phases: [trainers] median host microseconds of each; the trainers take turns."""
    taken: list[dict[str, list[float]]] = [{phase: [] for phase in PHASES} for _ in trainers]
    for step in range(NUM_WARMUP + num_steps):
        for trainer, times in zip(trainers, taken, strict=True):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            marks: list[tuple[str, float]] = []
            trainer.step(lambda phase, marks=marks: marks.append((phase, time.perf_counter())))  # type: ignore[misc]
            if step >= NUM_WARMUP:
                for (phase, begin), (_, end) in itertools.pairwise(marks):
                    times[phase].append((end - begin) * 1e6)
    return [{phase: statistics.median(values) for phase, values in times.items()} for times in taken]


@dataclass(frozen=True)
class Cost:
    """One kind of work in one phase: per unit, per step besides, and per further parameter."""

    per_unit: float
    per_step: float
    per_parameter: float


def costs(*, num_units: int, num_parameters: int, device: torch.device, strategy: str) -> dict[str, dict[str, Cost]]:
    """Return by kind and phase what the engine adds to the unsharded model."""
    sizes = ((num_units, num_parameters), (2 * num_units, num_parameters), (num_units, 10 * num_parameters))
    ours = [count(num_units=n, num_parameters=p, device=device, strategy=strategy) for n, p in sizes]
    plain = [count(num_units=n, num_parameters=p, device=device, strategy=None) for n, p in sizes]
    found: dict[str, dict[str, Cost]] = {}
    for kind in _COUNTED:
        found[kind] = {}
        for phase in PHASES:
            one, two, more = (
                getattr(a, kind)[phase] - getattr(b, kind)[phase] for a, b in zip(ours, plain, strict=True)
            )
            per_unit = (two - one) / num_units
            found[kind][phase] = Cost(
                per_unit, one - num_units * per_unit, (more - one) / (num_units * 9 * num_parameters)
            )
    return found


def growing_functions(
    *, num_units: int, num_parameters: int, device: torch.device, strategy: str
) -> list[tuple[str, str, float]]:
    """List (phase, function of the engine, lines that each further parameter adds), most lines first."""
    few, many = (
        count(num_units=num_units, num_parameters=p, device=device, strategy=strategy).lines_by_function
        for p in (num_parameters, 10 * num_parameters)
    )
    added = num_units * 9 * num_parameters
    grown = [(phase, name, (many[phase, name] - few[phase, name]) / added) for phase, name in many]
    return sorted((row for row in grown if row[2] > 0.01), key=lambda row: -row[2])


def busiest_functions(
    *, num_units: int, num_parameters: int, device: torch.device, strategy: str
) -> list[tuple[str, str, float, float]]:
    """List (phase, function of the engine, calls and lines that each further unit adds), most lines first."""
    few, many = (
        count(num_units=n, num_parameters=num_parameters, device=device, strategy=strategy)
        for n in (num_units, 2 * num_units)
    )
    rows = [
        (
            phase,
            name,
            (many.by_function[phase, name] - few.by_function[phase, name]) / num_units,
            (many.lines_by_function[phase, name] - few.lines_by_function[phase, name]) / num_units,
        )
        for phase, name in many.lines_by_function
    ]
    return sorted((row for row in rows if row[2] or row[3]), key=lambda row: -row[3])


@contextmanager
def rank_of_two(device: torch.device) -> Iterator[None]:
    """Initialise ``torch.distributed`` in a scope: NCCL on a GPU, else torch's fake process group of two ranks.

    On the CPU the transport calls the collectives that it calls on a GPU: sums in rank order would cost the host more.
    """
    with ExitStack() as stack:
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            alone = {} if "WORLD_SIZE" in os.environ else {"rank": 0, "world_size": 1, "store": HashStore()}
            dist.init_process_group("nccl", **alone)  # type: ignore[arg-type]
        else:
            dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
            for method in ("reduce_scatter", "all_reduce"):
                plain = getattr(ProcessGroupTransport, method)
                stack.enter_context(patch.object(RankOrderTransport, method, plain))
        stack.callback(dist.destroy_process_group)
        yield


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=24)
    parser.add_argument("--parameters", type=int, default=4, help="of each unit")
    parser.add_argument("--strategy", choices=list(STRATEGIES), default="optim_grads_params")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=50, help="steps to time")
    parser.add_argument("--functions", type=int, default=15, help="rows of the tables by function")
    parser.add_argument("--json", metavar="FILE", help="write all figures there too")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    size = {"num_units": options.units, "num_parameters": options.parameters, "device": device}
    torch.set_num_threads(1)
    with ExitStack() as stack:
        stack.enter_context(rank_of_two(device))
        trainers = [Trainer(**size, strategy=s, tally=Tally()) for s in (options.strategy, None)]
        ours, plain = time_phases(trainers, num_steps=options.steps, device=device)
        del trainers
        found = costs(**size, strategy=options.strategy)
        growing = growing_functions(**size, strategy=options.strategy)
        busiest = busiest_functions(**size, strategy=options.strategy)
        if dist.get_rank() == 0:
            report = {
                "units": options.units,
                "parameters": options.parameters,
                "strategy": options.strategy,
                "device": options.device,
                "torch": torch.__version__,
                "microseconds": {"sharded": ours, "unsharded": plain},
                "counts": {k: {p: asdict(c) for p, c in v.items()} for k, v in found.items()},
                "growing": growing,
                "busiest": busiest,
            }
            print(table(report, options.functions))
            if options.json:
                with open(options.json, "w") as file:
                    json.dump(report, file, indent=1)


def table(report: dict[str, Any], num_rows: int) -> str:
    """Format the figures as text."""
    units = report["units"]
    lines = [
        f"{units} units of {report['parameters']} parameters, {report['strategy']}, {report['device']}, torch {report['torch']}",
        "",
        f"{'host microseconds':22}{'forward':>12}{'backward':>12}{'step':>12}{'sum':>12}",
    ]
    ours, plain = (report["microseconds"][kind] for kind in ("sharded", "unsharded"))
    engine = {phase: ours[phase] - plain[phase] for phase in PHASES}
    rows = (("sharded", ours, 1), ("unsharded", plain, 1), ("engine", engine, 1), ("engine per unit", engine, units))
    for name, times, divisor in rows:
        values = [times[phase] / divisor for phase in PHASES]
        lines.append(f"{name:22}" + "".join(f"{value:12.1f}" for value in (*values, sum(values))))
    lines += ["", "Beyond the unsharded model: per unit | per step besides | per further parameter"]
    lines.append(f"{'':14}" + "".join(f"{phase:^30}" for phase in PHASES))
    for kind, phases in report["counts"].items():
        cells = (phases[phase] for phase in PHASES)
        lines.append(
            f"{kind:14}"
            + "".join(f"{c['per_unit']:9.2f} |{c['per_step']:8.1f} |{c['per_parameter']:8.2f} " for c in cells)
        )
    lines += ["", "Lines of the engine that a further parameter adds (a loop over parameters):"]
    lines += [f"  {added:6.2f}  {phase:9} {name}" for phase, name, added in report["growing"][:num_rows]] or ["  none"]
    lines += ["", "Calls and lines of the engine that a further unit adds:"]
    lines += [f"  {c:6.2f} {n:7.2f}  {phase:9} {name}" for phase, name, c, n in report["busiest"][:num_rows]]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
