"""Compare sharding engines on one training step: ``torchrun --nproc-per-node N benchmarks/compare.py --model 7.2b``.

The engines run one after the other in the same processes, on the same weights and tokens; each is deleted before the
next is built. On CUDA they are timed; on CPU (gloo) the script shows that each runs and that their losses agree.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

if __package__ in (None, ""):  # started as a file: what it imports lies beside and above it
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.engines.engine import Batch, Engine, EngineSettings
from benchmarks.engines.graphed import NUM_EAGER_STEPS
from benchmarks.engines.plain_gpt import SHAPES, Linear, PlainGpt
from benchmarks.engines.registry import NAMES, engine_kind, is_ours
from benchmarks.measure.memory import MemoryWatch, use_expandable_segments
from benchmarks.measure.steps import GIB, Measurement, make_batch, run_in_a_row, run_steps
from benchmarks.profile_step import NUM_PROFILED_STEPS, profile_engine
from benchmarks.reports import page as report
from benchmarks.reports.agreement import all_failed
from benchmarks.reports.bars import bars_section, graph_section

_TIMED_STEPS = 10
_CHECKED_STEPS = 20
# More than this left behind by an engine would be counted to the next one.
_LEFT_BEHIND_LIMIT = GIB // 16


@dataclass
class Results:
    """Measurements by engine, and why others did not run."""

    facts: list[tuple[str, str]]
    measurements: list[Measurement] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)
    """Why, by engine."""
    faults: list[str] = field(default_factory=list)
    """What makes the run fail: losses that differ, engines that raised."""


def main(argv: Sequence[str]) -> int:
    """Run the engines that the arguments name; return 1 where losses differ by more than noise or an engine failed.

    Ranks: all of the world; initialises the process group, unless there is one.
    """
    arguments = _parse(argv)
    if arguments.expandable_segments:
        use_expandable_segments()
    if arguments.deterministic:
        _use_deterministic_algorithms()
    owns_group = not dist.is_initialized()
    device = _start(owns_group)
    try:
        return _compare(arguments, device)
    finally:
        if owns_group:
            dist.destroy_process_group()


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="compare.py", description="Compare sharding engines on one training step.")
    parser.add_argument("--model", choices=list(SHAPES), default="1.1b", help="size of the GPT")
    parser.add_argument(
        "--tokens", type=_positive, default=2048, help="tokens of a microbatch on each rank, one sequence"
    )
    parser.add_argument("--microbatches", type=_positive, default=1, help="microbatches of a step")
    parser.add_argument(
        "--steps",
        type=_positive,
        help=f"measured steps; {_TIMED_STEPS} by default, {_CHECKED_STEPS} with --check-losses",
    )
    parser.add_argument("--warmup", type=_positive, default=4, help="steps before them")
    parser.add_argument("--engines", type=_engine_names, default="ideal,fsdp2,ours-nccl,ours-peer", help=NAMES)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=1234, help="of weights and tokens")
    parser.add_argument("--output", type=Path, help="markdown page to write, after each engine anew")
    parser.add_argument(
        "--expandable-segments",
        action="store_true",
        help="let PyTorch's allocator grow its segments in place, for every engine; ours-symm does not run then",
    )
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="only kernels that add in a fixed order, so that an engine's losses can be bitwise those of another run",
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--check-losses",
        action="store_true",
        help="instead of timing, fail where a step of ours differs from fsdp2's by more than bf16 noise",
    )
    mode.add_argument(
        "--profile",
        type=Path,
        metavar="FOLDER",
        help="instead of timing, write a summary of one step of each engine there",
    )
    arguments = parser.parse_args(argv)
    if arguments.steps is None:
        arguments.steps = _CHECKED_STEPS if arguments.check_losses else _TIMED_STEPS
    if arguments.check_losses:
        arguments.warmup = 0
        arguments.engines = [name for name in arguments.engines if name != "ideal"]
        if "fsdp2" not in arguments.engines or not any(is_ours(name) for name in arguments.engines):
            parser.error(
                f"--check-losses needs fsdp2 and an engine of ours, got --engines {','.join(arguments.engines)}"
            )
    elif arguments.warmup <= NUM_EAGER_STEPS and any(engine_kind(name).is_graph for name in arguments.engines):
        parser.error(
            f"an engine in a CUDA graph is captured in step {NUM_EAGER_STEPS + 1}, which must not be timed: --warmup must "
            f"be at least {NUM_EAGER_STEPS + 1}, got {arguments.warmup}"
        )
    if arguments.profile is not None:
        if arguments.output is not None:
            parser.error("--profile writes no page, got --output; a profiler left running would spoil times")
        arguments.steps = NUM_PROFILED_STEPS
    return arguments


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be positive, got {value}")
    return value


def _engine_names(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        try:
            engine_kind(name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return names


def _use_deterministic_algorithms() -> None:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # before cuBLAS makes its first handle
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # would write to all that is allocated


def _start(owns_group: bool) -> torch.device:
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    if owns_group:
        # device_id makes NCCL connect now, not in the first engine's first step.
        dist.init_process_group("nccl", device_id=device) if device.type == "cuda" else dist.init_process_group("gloo")
    return device


def _compare(arguments: argparse.Namespace, device: torch.device) -> int:
    shape = SHAPES[arguments.model]
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    settings = EngineSettings(
        shape=shape,
        mesh=mesh,
        device=device,
        learning_rate=arguments.learning_rate,
        seed=arguments.seed,
        num_microbatches=arguments.microbatches,
    )
    batches = [
        make_batch(
            step,
            num_microbatches=arguments.microbatches,
            num_tokens=arguments.tokens,
            vocab_size=shape.vocab_size,
            seed=arguments.seed,
            device=device,
        )
        for step in range(arguments.warmup + arguments.steps)
    ]
    _connect(device)
    results = Results(_facts(arguments, device))
    for name in arguments.engines:
        reason = engine_kind(name).why_not(settings)
        if reason is None:
            _run(name, settings, batches, arguments, results)
        else:
            results.not_run[name] = reason
            _say(f"{name} does not run: {reason}")
        if arguments.profile is None and results.measurements:
            _publish(arguments, results, is_complete=name == arguments.engines[-1])
    return 1 if results.faults else 0


def _connect(device: torch.device) -> None:
    """Use the process group once, so that the buffers of its first use are charged to no engine."""
    if device.type != "cuda":
        return
    part = torch.zeros(1024, device=device)
    parts = [torch.zeros_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part)
    dist.reduce_scatter(part, parts)
    dist.all_reduce(part)
    torch.cuda.synchronize(device)


def _facts(arguments: argparse.Namespace, device: torch.device) -> list[tuple[str, str]]:
    with torch.device("meta"):
        model = PlainGpt(SHAPES[arguments.model], linear=Linear, dtype=torch.bfloat16, seed=arguments.seed)
    return report.facts_of_run(
        device,
        [
            ("step", f"{arguments.microbatches} x {arguments.tokens} tokens on each rank, bf16, no clipping"),
            ("steps", f"{arguments.warmup} to warm up, {arguments.steps} measured"),
        ],
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def _run(
    name: str, settings: EngineSettings, batches: list[Batch], arguments: argparse.Namespace, results: Results
) -> None:
    """Build the engine, time or profile it, and free everything that it allocated.

    An error on all ranks is recorded and the next engine follows; an error on some ranks ends the run.
    """
    try:
        if arguments.profile is not None:
            _profile(name, settings, batches, arguments)
        else:
            results.measurements.append(_measure(name, settings, batches, arguments))
            _say(f"{name} has run")
    except Exception as error:
        traceback.print_exc()
        if not all_failed(name):
            raise
        reason = f"it failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        results.not_run[name] = reason
        results.faults.append(f"{name}: {reason}")
        _say(f"{name}: {reason}")


def _measure(name: str, settings: EngineSettings, batches: list[Batch], arguments: argparse.Namespace) -> Measurement:
    memory = MemoryWatch(settings.device)
    if memory.allocated_at_start > _LEFT_BEHIND_LIMIT:
        _say(f"warning: {memory.allocated_at_start / GIB:.2f} GiB are allocated before {name} is built and count to it")
    measurement = Measurement(name=name, num_warmup=arguments.warmup)
    engine = engine_kind(name).build(settings)
    try:
        run_steps(engine, batches, measurement, settings.device, memory=memory, with_norm=arguments.check_losses)
        if not arguments.check_losses:
            run_in_a_row(engine, batches[arguments.warmup :], measurement, settings.device)
    finally:
        _close(engine, settings.device)
    return measurement


def _profile(name: str, settings: EngineSettings, batches: list[Batch], arguments: argparse.Namespace) -> None:
    memory = MemoryWatch(settings.device)
    engine = engine_kind(name).build(settings)
    try:
        warmup = Measurement(name=name, num_warmup=arguments.warmup)
        run_steps(engine, batches[: arguments.warmup], warmup, settings.device, memory=memory, with_norm=False)
        summary = profile_engine(engine, batches[arguments.warmup :], settings.device)
    finally:
        _close(engine, settings.device)
    if dist.get_rank() == 0:
        arguments.profile.mkdir(parents=True, exist_ok=True)
        path = arguments.profile / f"profile_{arguments.model}_{arguments.tokens}.txt"
        with path.open("w" if name == arguments.engines[0] else "a") as file:
            file.write(f"==== one step of {name}, rank 0\n{summary}\n\n")
        _say(f"==== one step of {name}, rank 0 ({path})\n{summary}")


def _close(engine: Engine, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # nothing may run on a communicator that is given back
    engine.close()


def _publish(arguments: argparse.Namespace, results: Results, *, is_complete: bool) -> None:
    """Write the page of the engines that have run so far, and print it once all have."""
    measurements = results.measurements
    sections = [report.losses_table(measurements)]
    if arguments.check_losses:
        reference = next((m for m in measurements if m.name == "fsdp2"), None)
        if reference is not None:
            section, faults = report.check_section(measurements, reference)
            sections.insert(0, section)
            results.faults += [fault for fault in faults if fault not in results.faults]
    else:
        sections.insert(0, report.times_table(measurements, results.not_run))
        if any(is_ours(m.name) for m in measurements):
            sections.insert(1, bars_section(measurements, arguments.model, arguments.tokens))
            sections.insert(2, report.plans_section(measurements))
    graphs = graph_section(measurements, is_deterministic=arguments.deterministic)
    if graphs:
        sections.insert(-1, graphs)
    what = "Losses" if arguments.check_losses else "Sharding engines"
    text = report.page(f"{what}: {arguments.model}, {arguments.tokens} tokens", results.facts, sections)
    if dist.get_rank() == 0 and arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text)
    if is_complete:
        _say(text)


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
