"""Compares sharding engines on one training step: ``torchrun --nproc-per-node N benchmarks/compare.py --model 7.2b``.

The engines run in turn in one process group, on the same weights and tokens; each is deleted before the next is built.
On CUDA it times; on CPU (gloo) it shows that everything runs and that the losses agree.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):  # started as a file: what it imports lies beside and above it
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import report
from benchmarks.engines import ENGINES, Batch, EngineSettings
from benchmarks.measure import GIB, Measurement, make_batch, run_steps, start_memory
from benchmarks.plain_gpt import SHAPES, Linear, PlainGpt
from benchmarks.profile_step import profile_engine

_CHECKED_STEPS = 20
_PROFILED_STEPS = 3
# More than this left behind by an engine would be counted to the next one.
_LEFT_BEHIND_LIMIT = GIB // 16


def main(argv: Sequence[str]) -> int:
    """Compare as the arguments say; the exit status is 1 where the losses differ by more than noise.

    Ranks: all of the world; initialises the process group, unless there is one.
    """
    arguments = _parse(argv)
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
    parser.add_argument("--steps", type=_positive, default=10, help="measured steps")
    parser.add_argument("--warmup", type=_positive, default=4, help="steps before them")
    parser.add_argument(
        "--engines", type=_engine_names, default="ideal,fsdp2,ours,ours-linear", help=", ".join(ENGINES)
    )
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=1234, help="of weights and tokens")
    parser.add_argument("--output", type=Path, help="markdown page to write, after each engine anew")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--check-losses",
        action="store_true",
        help=f"instead of timing, run {_CHECKED_STEPS} steps and fail where ours differ from fsdp2 by more than bf16 noise",
    )
    mode.add_argument(
        "--profile",
        type=Path,
        metavar="FOLDER",
        help="instead of timing, write a summary of one step of each engine there",
    )
    arguments = parser.parse_args(argv)
    if arguments.check_losses:
        arguments.warmup, arguments.steps = 0, _CHECKED_STEPS
        arguments.engines = [name for name in arguments.engines if name != "ideal"]
        if "fsdp2" not in arguments.engines or not any(name.startswith("ours") for name in arguments.engines):
            parser.error(
                f"--check-losses needs fsdp2 and an engine of ours, got --engines {','.join(arguments.engines)}"
            )
    if arguments.profile is not None:
        if arguments.output is not None:
            parser.error("--profile writes no page, got --output; a profiler left running would spoil times")
        arguments.steps = _PROFILED_STEPS
    return arguments


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be positive, got {value}")
    return value


def _engine_names(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in ENGINES]
    if unknown:
        raise argparse.ArgumentTypeError(f"engines must be among {', '.join(ENGINES)}, got {', '.join(unknown)}")
    return names


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
        shape=shape, mesh=mesh, device=device, learning_rate=arguments.learning_rate, seed=arguments.seed
    )
    with torch.device("meta"):
        model = PlainGpt(shape, linear=Linear, dtype=torch.bfloat16, seed=arguments.seed)
    facts = report.facts_of_run(
        device,
        sum(parameter.numel() for parameter in model.parameters()),
        [
            ("step", f"{arguments.microbatches} x {arguments.tokens} tokens on each rank, bf16, no clipping"),
            ("steps", f"{arguments.warmup} to warm up, {arguments.steps} measured"),
        ],
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
    if arguments.profile is not None:
        for name in arguments.engines:
            _profile(name, settings, batches, arguments)
        return 0
    measurements: list[Measurement] = []
    faults: list[str] = []
    for name in arguments.engines:
        measurements.append(_measure(name, settings, batches, arguments))
        faults = _publish(arguments, facts, measurements)
    return 1 if faults else 0


def _measure(name: str, settings: EngineSettings, batches: list[Batch], arguments: argparse.Namespace) -> Measurement:
    """Build the engine, run it, and leave nothing of it behind."""
    left_behind = start_memory(settings.device)
    if left_behind > _LEFT_BEHIND_LIMIT:
        _say(f"warning: {left_behind / GIB:.2f} GiB are allocated before {name} is built, and count to its memory")
    measurement = Measurement(name=name, num_warmup=arguments.warmup)
    engine = ENGINES[name](settings)
    run_steps(engine, batches, measurement, settings.device, with_grad_norm=arguments.check_losses)
    return measurement


def _profile(name: str, settings: EngineSettings, batches: list[Batch], arguments: argparse.Namespace) -> None:
    """Build the engine, warm it up, and write a summary of one step."""
    start_memory(settings.device)
    engine = ENGINES[name](settings)
    warmup = Measurement(name=name, num_warmup=arguments.warmup)
    run_steps(engine, batches[:-_PROFILED_STEPS], warmup, settings.device, with_grad_norm=False)
    summary = profile_engine(engine, batches[-_PROFILED_STEPS:], settings.device)
    if dist.get_rank() == 0:
        arguments.profile.mkdir(parents=True, exist_ok=True)
        path = arguments.profile / f"profile_{arguments.model}_{arguments.tokens}.txt"
        with path.open("w" if name == arguments.engines[0] else "a") as file:
            file.write(f"==== one step of {name}, rank 0\n{summary}\n\n")
        _say(f"==== one step of {name}, rank 0 ({path})\n{summary}")


def _publish(arguments: argparse.Namespace, facts: list[tuple[str, str]], measurements: list[Measurement]) -> list[str]:
    """Print the page when it is complete, write it as far as it goes; returns the faults of the loss check."""
    faults: list[str] = []
    sections = [report.losses_table(measurements)]
    if arguments.check_losses:
        reference = next((m for m in measurements if m.name == "fsdp2"), None)
        if reference is not None:
            section, faults = report.check_section(measurements, reference)
            sections.insert(0, section)
    else:
        sections.insert(0, report.times_table(measurements))
    what = "Losses" if arguments.check_losses else "Sharding engines"
    text = report.page(f"{what}: {arguments.model}, {arguments.tokens} tokens", facts, sections)
    if dist.get_rank() == 0 and arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text)
    is_complete = len(measurements) == len(arguments.engines)
    _say(text if is_complete else f"{measurements[-1].name} has run")
    return faults


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
