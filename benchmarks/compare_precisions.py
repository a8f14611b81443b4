"""Train one model in several precisions: ``torchrun ... benchmarks/compare_precisions.py OUTPUT.md --runs A,B,... FLAGS``.

FLAGS are those of ``pretrain_gpt.py``, which trains with them once for each run, in turn and in the same processes, from the
same weights and on the same samples. A run is one of RUNS, followed by any of OPTIONS, joined by +: ``delayed+graph``. The page
compares times, memory, bytes gathered (counted) and losses, all as the training log has them; beside it lie the losses
(OUTPUT.csv) and their curves (OUTPUT.svg).
"""

from __future__ import annotations

import argparse
import csv
import gc
import statistics
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

if __package__ in (None, ""):  # started as a file: what it imports lies above it
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

import pretrain_gpt
from benchmarks.measure.wire import Wire, counted_wire
from benchmarks.reports.agreement import all_failed
from benchmarks.reports.curves import curves_svg
from benchmarks.reports.page import facts_of_run
from benchmarks.reports.page import page as markdown_page
from megatron.core.extensions import why_missing
from megatron.training.arguments import Settings, parse_settings
from megatron.training.cli.flag_parser import FlagError
from megatron.training.launch.distributed_init import initialize_distributed
from megatron.training.launch.gpt_config import why_no_transformer_engine
from megatron.training.launch.pretrain import pretrain
from megatron.training.loop.train_step import Batch
from megatron.training.telemetry.log_line import LogRecord
from megatron.training.telemetry.metrics import MetricLog

_FP8 = ["--transformer-impl", "transformer_engine", "--fp8-format", "hybrid", "--fp8-param-gather", "--fp8-recipe"]
RUNS: dict[str, list[str]] = {
    "local": ["--transformer-impl", "local"],
    "bf16": ["--transformer-impl", "transformer_engine"],
    "delayed": [*_FP8, "delayed", "--fp8-amax-history-len", "1024", "--fp8-amax-compute-algo", "max"],
    "tensorwise": [*_FP8, "tensorwise"],
    "blockwise": [*_FP8, "blockwise"],
}
"""bf16 with the framework's own layers, and with transformer-engine's; FP8, weights at rest and on the wire in one byte."""
OPTIONS: dict[str, list[str]] = {
    "graph": ["--cuda-graph-impl", "full_iteration"],
    "keep": ["--keep-fp8-transpose-cache"],
    "attention": ["--fp8-dot-product-attention"],
    "fuser": ["--use-transformer-engine-op-fuser"],
    "recompute": [
        *("--use-transformer-engine-op-fuser", "--recompute-granularity", "selective", "--recompute-modules", "mlp_act")
    ],
    "store": ["--use-transformer-engine-op-fuser", "--activation-func-fp8-input-store"],
    "wide": [],
}
"""Steps in a CUDA graph; transposed bytes kept from forward to backward; attention in FP8; the MLP's activation and its gradient
written in FP8; and this activation computed again in backward, or its input kept in FP8 for it; weights on the wire in bf16."""

_GIB = 2**30


@dataclass(kw_only=True)
class Outcome:
    """What a run gave."""

    name: str
    records: list[LogRecord]
    peak_gib: tuple[float, float]
    """Allocated, reserved."""
    num_parameters: int
    step_wire: Wire
    """Bytes that this rank gathered in its last step on the host."""

    def ms(self, warm_up: int) -> float:
        """Return the median time of an iteration over the lines of the log after the warm-up."""
        return statistics.median(record.ms_per_iteration for record in self.records if record.iteration > warm_up)

    def final_loss(self, last: int) -> float:
        """Return the mean loss of the last iterations; each line has the mean of those since the line before."""
        first = self.records[-1].iteration - last
        return statistics.mean(record.loss for record in self.records if record.iteration > first)

    @property
    def is_fp8(self) -> bool:
        """Whether its layers multiply in FP8."""
        return "--fp8-format" in flags_of(self.name)


@dataclass
class Results:
    """Outcomes of all runs so far, why others did not run, and what went wrong."""

    outcomes: list[Outcome] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def flags_of(name: str) -> list[str]:
    """Return the flags of a run.

    Raises:
        ValueError: there is no such run or option.
    """
    base, *options = name.split("+")
    if base not in RUNS or not set(options) <= OPTIONS.keys():
        raise ValueError(
            f"a run must be one of {', '.join(RUNS)}, then any of {', '.join(f'+{option}' for option in OPTIONS)}, got {name}"
        )
    flags = RUNS[base] + [flag for option in options for flag in OPTIONS[option]]
    return [flag for flag in flags if flag != "--fp8-param-gather"] if "wide" in options else flags


class _Watch:
    """The forward of a run, which notes the bytes that were gathered before each step."""

    def __init__(self, num_microbatches: int, wire: Wire) -> None:
        self._num_microbatches, self._wire = num_microbatches, wire
        self._num_forwards = 0
        self._before: list[Wire] = []
        self.num_parameters = 0

    def forward_step(self, batch: Batch, model: torch.nn.Module) -> Any:
        if self._num_forwards % self._num_microbatches == 0:
            self._before = [*self._before[-1:], self._wire.copy()]
        self._num_forwards += 1
        if not self.num_parameters:
            self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        return pretrain_gpt.forward_step(batch, model)

    def step_wire(self) -> Wire:
        """Return the bytes between the first forwards of the last two steps that ran on the host."""
        return self._before[-1].since(self._before[0])


@contextmanager
def _recorded_log() -> Iterator[list[LogRecord]]:
    """Keep the values of all lines of the log that are written in the scope; every rank has them."""
    records: list[LogRecord] = []
    write = MetricLog._write_record

    def recorded(self: MetricLog, record: LogRecord) -> None:
        if record.is_due:  # the first iteration has a line of its own besides
            records.append(record)
        write(self, record)

    with patch.object(MetricLog, "_write_record", recorded):
        yield records


def train(name: str, settings: Settings, device: torch.device) -> Outcome:
    """Train once. Ranks: all."""
    _free(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with _recorded_log() as records, counted_wire() as wire:
        watch = _Watch(settings.batch.num_microbatches, wire)
        pretrain(
            settings,
            model_provider=pretrain_gpt.model_provider,
            datasets_provider=pretrain_gpt.datasets_provider,
            forward_step=watch.forward_step,
        )
    memory = records[-1].memory  # in MiB, with what other ranks read
    peak = memory.get("max memory allocated", 0.0) / 1024, memory.get("max memory reserved", 0.0) / 1024
    return Outcome(
        name=name, records=records, peak_gib=peak, num_parameters=watch.num_parameters, step_wire=watch.step_wire()
    )


def _free(device: torch.device) -> None:
    """Free what an earlier run has left, also transformer-engine's references to its modules."""
    if why_missing("transformer_engine_layers") is None:
        from megatron.core.extensions.transformer_engine_layers import te

        te.fp8.FP8GlobalStateManager.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def run(arguments: argparse.Namespace, flags: Sequence[str]) -> int:
    """Train all runs and write the page after each; return 1 where one failed or its final loss is off. Ranks: all."""
    results = Results()
    settings = parse_settings([*flags, *flags_of(arguments.runs[0])])
    if settings.loop.train_iters <= arguments.warm_up:
        raise SystemExit(
            f"--train-iters must be more than --warm-up {arguments.warm_up}, got {settings.loop.train_iters}"
        )
    owns_group = not dist.is_initialized()
    device = initialize_distributed(settings.distributed)
    missing = why_no_transformer_engine(device.type)
    for name in arguments.runs:
        if missing is not None and "--fp8-format" in flags_of(name):
            results.not_run[name] = missing
            continue
        if "graph" in name.split("+") and device.type != "cuda":
            results.not_run[name] = f"CUDA graphs need CUDA devices, and these are {device.type}"
            continue
        try:
            settings = parse_settings([*flags, *flags_of(name)])
        except FlagError as error:
            results.not_run[name] = str(error)
            continue
        try:
            results.outcomes.append(train(name, settings, device))
        except Exception as error:
            traceback.print_exc()
            if not all_failed(name):
                raise
            results.not_run[name] = (
                f"it failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            )
            results.faults.append(name)
        if results.outcomes and dist.get_rank() == 0:  # for when a later run takes too long
            _write(arguments, settings, results, device)
    if dist.get_rank() == 0 and results.outcomes:
        _write(arguments, settings, results, device)
        print(arguments.output.read_text())
    if owns_group:
        dist.destroy_process_group()
    if not results.outcomes:
        print(f"nothing was trained: {results.not_run}")
    return int(bool(results.faults) or not results.outcomes)


def _write(arguments: argparse.Namespace, settings: Settings, results: Results, device: torch.device) -> None:
    output: Path = arguments.output
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(_page(arguments, settings, results, device))
    with output.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["run", "iteration", "loss", "grad_norm", "ms"])
        for outcome in results.outcomes:
            for record in outcome.records:
                row = (
                    record.iteration,
                    f"{record.loss:.8g}",
                    f"{record.grad_norm:.6g}",
                    f"{record.ms_per_iteration:.3f}",
                )
                writer.writerow([outcome.name, *row])
    curves = {outcome.name: [(float(r.iteration), r.loss) for r in outcome.records] for outcome in results.outcomes}
    title = f"Loss, {results.outcomes[0].num_parameters / 1e6:.0f} million parameters, {settings.batch.global_batch_size} sequences a step"
    output.with_suffix(".svg").write_text(curves_svg(title, curves, x_label="iteration", y_label="loss"))


def _page(arguments: argparse.Namespace, settings: Settings, results: Results, device: torch.device) -> str:
    batch, length = settings.batch, settings.data.seq_length
    sequences = f"{batch.num_microbatches} x {batch.micro_batch_size} sequences of {length} tokens on each rank"
    extra = [
        ("step", sequences),
        ("iterations", f"{settings.loop.train_iters}, times of those after {arguments.warm_up}"),
    ]
    if arguments.note:
        extra.append(("note", arguments.note))
    facts = facts_of_run(device, extra, num_parameters=results.outcomes[0].num_parameters)
    missing = why_no_transformer_engine(device.type)
    layers = f"none, so all layers are the framework's own: {missing}" if missing else _version_of_te()
    facts.insert(4, ("transformer-engine", layers))
    sections = [_table(arguments, settings, results.outcomes)]
    sections += [f"`{outcome.name}`: `{' '.join(flags_of(outcome.name))}`" for outcome in results.outcomes]
    sections.append("\n".join(f"- {name} did not run: {reason}" for name, reason in results.not_run.items()))
    sections.append(_verdicts(arguments, results.outcomes))
    sections.append(_losses(results.outcomes))
    return markdown_page("One model in several precisions", facts, sections)


def _version_of_te() -> str:
    import transformer_engine

    return str(transformer_engine.__version__)


def _table(arguments: argparse.Namespace, settings: Settings, outcomes: Sequence[Outcome]) -> str:
    best, reference = _fastest_bf16(arguments, outcomes), outcomes[0]
    tokens = settings.batch.num_microbatches * settings.batch.micro_batch_size * settings.data.seq_length
    lines = [
        "| run | ms per iteration | tokens/s per GPU | bf16 / it | peak allocated / reserved, GiB | bytes gathered in a step "
        f"| bytes reduced for scales | loss of the last {arguments.last} | by {reference.name}'s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for outcome in outcomes:
        ms, loss, wire = outcome.ms(arguments.warm_up), outcome.final_loss(arguments.last), outcome.step_wire
        speed = "" if best is None else f"{best.ms(arguments.warm_up) / ms:.3f}"
        by_dtype = " + ".join(f"{nbytes:,} {dtype}" for dtype, nbytes in sorted(wire.gathered.items()))
        lines.append(
            f"| {outcome.name} | {ms:.1f} | {1e3 * tokens / ms:,.0f} | {speed} "
            f"| {outcome.peak_gib[0]:.1f} / {outcome.peak_gib[1]:.1f} "
            f"| {by_dtype or 'none'} | {wire.maxima:,} "
            f"| {loss:.5f} | {loss / reference.final_loss(arguments.last):.5f} |"
        )
    lines.append("")
    lines.append(
        "Bytes are counted on rank 0, where transports hand them to the library or the driver: what one rank receives in the "
        "last step that its host ran (a CUDA graph's replays are not counted, its eager steps are)."
    )
    return "\n".join(lines)


def _fastest_bf16(arguments: argparse.Namespace, outcomes: Sequence[Outcome]) -> Outcome | None:
    bf16 = [outcome for outcome in outcomes if not outcome.is_fp8]
    return min(bf16, key=lambda outcome: outcome.ms(arguments.warm_up), default=None)


def _verdicts(arguments: argparse.Namespace, outcomes: Sequence[Outcome]) -> str:
    """Write what was asked for beside what was reached, for each run in FP8."""
    best, lines = _fastest_bf16(arguments, outcomes), []
    for outcome in outcomes:
        if best is None or not outcome.is_fp8:
            continue
        if arguments.bar_speed is not None:
            ratio = best.ms(arguments.warm_up) / outcome.ms(arguments.warm_up)
            word = "met" if ratio >= arguments.bar_speed else "MISSED"
            lines.append(
                f"- {outcome.name}: {ratio:.3f} times as fast as {best.name}, asked {arguments.bar_speed}: {word}"
            )
        if arguments.bar_loss is not None:
            apart = abs(outcome.final_loss(arguments.last) / outcomes[0].final_loss(arguments.last) - 1)
            word = "met" if apart <= arguments.bar_loss else "MISSED"
            lines.append(
                f"- {outcome.name}: final loss {apart:.3%} from {outcomes[0].name}'s, allowed {arguments.bar_loss:.1%}: {word}"
            )
    return "\n".join(lines)


def _losses(outcomes: Sequence[Outcome]) -> str:
    """Write the losses of at most 20 lines of the log."""
    records = [outcome.records for outcome in outcomes]
    count = min(map(len, records))
    picked = range(count - 1, -1, -max(1, count // 20))
    head = f"| iteration | {' | '.join(outcome.name for outcome in outcomes)} |\n|---|{'---|' * len(outcomes)}"
    rows = [
        f"| {records[0][i].iteration} | {' | '.join(f'{of[i].loss:.5f}' for of in records)} |" for i in sorted(picked)
    ]
    return "\n".join(["Losses, each the mean of the iterations since the line of the log before it:", "", head, *rows])


def _run_names(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        try:
            flags_of(name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return names


def main(argv: Sequence[str]) -> int:
    """Parse what is not a flag of ``pretrain_gpt.py`` and run. Ranks: all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("output", type=Path, help="markdown page to write")
    parser.add_argument(
        "--runs", type=_run_names, default=["local", "bf16", "delayed"], help="the first is the reference"
    )
    parser.add_argument("--warm-up", type=int, default=10, help="iterations before those that are timed (default: 10)")
    parser.add_argument("--last", type=int, default=20, help="iterations of the final loss (default: 20)")
    parser.add_argument("--bar-speed", type=float, help="FP8 must be so many times as fast as the fastest in bf16")
    parser.add_argument("--bar-loss", type=float, help="share by which the final loss may differ from the first run's")
    parser.add_argument("--note", help="a line for the page")
    arguments, flags = parser.parse_known_args(argv)
    return run(arguments, flags)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
