"""Measure what an overlap report costs other steps: ``torchrun ... benchmarks/overlap_cost.py OUTPUT.md FLAGS``.

FLAGS are those of ``pretrain_gpt.py``, which trains with them without a report and with one, in turn and twice, eagerly and on CUDA devices
as a CUDA graph. The page has the medians of the steps before and after those that the report watches; beside it lie the reports
(OUTPUT/eager, OUTPUT/graph), what changes from one to the other, and rank 0's traces from which the reports were made.
"""

from __future__ import annotations

import gc
import gzip
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

if __package__ in (None, ""):  # started as a file: what it imports lies above it
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

import pretrain_gpt
from benchmarks.reports.page import facts_of_run
from benchmarks.reports.page import page as markdown_page
from megatron.core.distributed.fsdp import fully_shard
from megatron.core.distributed.fsdp.overlap_report import (
    OverlapReport,
    compare_reports,
    comparison_page,
    comparison_text,
    read_report,
    recorder,
)
from megatron.training.arguments import parse_settings
from megatron.training.launch.distributed_init import initialize_distributed
from megatron.training.launch.pretrain import pretrain
from megatron.training.loop.train_step import TrainStep

WARM_UP = 8
REPORTED = 20
NUM_AFTER = 15
GRAPH = ["--cuda-graph-impl", "full_iteration"]
BAR = 1.01
"""Of the time without a report: what a step may take that is not watched."""


def launch_us(device: torch.device) -> float:
    """Return the least microseconds that the host takes to launch a small kernel, over many."""
    value = torch.zeros(8, device=device)
    best = float("inf")
    for _ in range(20):
        _wait(device)
        began = time.perf_counter()
        for _ in range(500):
            value.add_(1.0)
        best = min(best, (time.perf_counter() - began) / 500)
    return 1e6 * best


def unwatched_us(device: torch.device) -> float:
    """Return the least microseconds that a report takes in a step that it does not watch. Ranks: all, alike."""
    model = torch.nn.Linear(8, 8, device=device)
    fully_shard(model)
    report = OverlapReport("unused", model, step=1_000_000)
    best = float("inf")
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(500):
            with report.step():
                pass
        best = min(best, (time.perf_counter() - began) / 500)
    return 1e6 * best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _timed_steps() -> Iterator[list[float]]:
    """Note when the host begins each step; it is never more than one step ahead of the device, since it reads losses."""
    begins: list[float] = []
    call = TrainStep.__call__

    def timed(self: TrainStep, *args: Any) -> Any:
        begins.append(time.perf_counter())
        return call(self, *args)

    with patch.object(TrainStep, "__call__", timed):
        yield begins


def train(flags: Sequence[str], device: torch.device) -> list[float]:
    """Train once, and return the milliseconds of each step but the last. Ranks: all."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with _timed_steps() as begins:
        pretrain(
            parse_settings(flags),
            model_provider=pretrain_gpt.model_provider,
            datasets_provider=pretrain_gpt.datasets_provider,
            forward_step=pretrain_gpt.forward_step,
        )
    return [1e3 * (later - earlier) for earlier, later in itertools.pairwise(begins)]


@contextmanager
def _kept_traces(folder: Path) -> Iterator[None]:
    """Keep rank 0's traces that reports of the scope are made from."""
    read = recorder._events

    def kept(recorded: Any) -> Any:
        base, events = read(recorded)
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            with gzip.open(folder / f"trace_{len(list(folder.glob('trace_*')))}.json.gz", "wt") as file:
                json.dump({"baseTimeNanoseconds": base, "traceEvents": events}, file)
        return base, events

    with patch.object(recorder, "_events", kept):
        yield


def medians(ms: Sequence[float]) -> tuple[float, float]:
    """Return the median before the steps that are watched, and after them."""
    return statistics.median(ms[WARM_UP : REPORTED - 4]), statistics.median(ms[REPORTED + 1 :])


def measure(name: str, flags: Sequence[str], folder: Path, device: torch.device) -> str:
    """Train without and with a report, twice, and return the rows of a table. Ranks: all."""
    report = ["--overlap-report", str(folder / name), "--overlap-report-step", str(REPORTED)]
    without: list[tuple[float, float]] = []
    within: list[tuple[float, float]] = []
    for _ in range(2):
        without.append(medians(train(flags, device)))
        with _kept_traces(folder / name) if not within else nullcontext():
            within.append(medians(train([*flags, *report], device)))
    best = [min(times) for times in zip(*without, strict=True)]
    rows = []
    for at, when in enumerate(("before", "after")):
        reported = min(times[at] for times in within)
        verdict = "kept" if reported <= BAR * best[at] else "MISSED" if device.type == "cuda" else "a rehearsal"
        rows.append(
            f"| {name} | {when} | {best[at]:.2f} | {reported:.2f} | {reported / best[at] - 1:+.2%} | {verdict} | "
            f"{_each(without, at)} | {_each(within, at)} |"
        )
    return "\n".join(rows)


def _each(times: Sequence[tuple[float, float]], at: int) -> str:
    return ", ".join(f"{of_run[at]:.2f}" for of_run in times)


def main(argv: Sequence[str]) -> int:
    """Measure and write the page. Ranks: all."""
    output, flags = Path(argv[0]), [*argv[1:], "--train-iters", str(REPORTED + NUM_AFTER)]
    folder = output.with_suffix("")
    settings = parse_settings(flags)
    owns_group = not dist.is_initialized()
    device = initialize_distributed(settings.distributed)
    launches = [launch_us(device)]
    runs = {"eager": flags} | ({"graph": [*flags, *GRAPH]} if device.type == "cuda" else {})
    rows = []
    for name, run in runs.items():
        rows.append(measure(name, run, folder, device))
        launches.append(launch_us(device))
    unwatched = unwatched_us(device)
    if dist.get_rank() == 0:
        table = (
            "| run | steps | ms without | ms with | difference | at most 1 % | each run without | each run with |\n"
            "|---|---|---|---|---|---|---|---|\n"
        )
        sections = [
            f"Medians of the steps before and after the three that a report of step {REPORTED} watches, the lower of two runs each.\n\n{table}"
            + "\n".join(rows)
        ]
        sections.append(
            f"The host launches a small kernel in {launches[0]:.2f} us before the first report, and in "
            + ", ".join(f"{us:.2f} us after those of {name} runs" for name, us in zip(runs, launches[1:], strict=True))
            + f"; a report takes {unwatched:.2f} us of the host in a step that it does not watch."
        )
        reports = {name: read_report(folder / name) for name in runs}
        sections += [f"{name}: {report['headline']}" for name, report in reports.items()]
        if len(reports) == 2:
            comparison = compare_reports(*reports.values(), names=("eager", "graph"))
            (folder / "comparison.html").write_text(comparison_page(comparison), encoding="utf-8")
            sections.append(f"```\n{comparison_text(comparison)}\n```")
        output.write_text(markdown_page("What an overlap report costs other steps", facts_of_run(device, []), sections))
        print(output.read_text())
    if owns_group:
        dist.destroy_process_group()
    return int(any("MISSED" in each for each in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
