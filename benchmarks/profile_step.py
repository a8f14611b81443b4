"""Profile one step: how far communication hides behind compute, and where the host spends its time.

Only a summary in text is written: the trace of a large model has gigabytes.
"""

from __future__ import annotations

import cProfile
import io
import pstats
import re
from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks.engines.engine import Batch, Engine
from benchmarks.measure.overlap import Interval, length, overlap
from benchmarks.measure.phases import time_phases

# Kernels are recognised by name; NCCL's annotations ("nccl:...") are no kernels. Peer copy's copies, barriers and sums
# are communication.
_BARRIER, _SUM = r"(.*symmetric_memory.*|.*barrier_kernel)", r"_sum_kernel"
_COMMUNICATION = re.compile(rf"^(nccl(Dev|Symk|Kernel)|Memcpy PtoP|{_BARRIER}|{_SUM})")
_GEMM = re.compile(r"gemm|nvjet|cutlass|xmma|wgmma", re.IGNORECASE)
_MEMORY = re.compile(r"^Mem(cpy|set)")
# Calls of the driver that launch a kernel, a copy or a whole graph.
_LAUNCH = re.compile(r"^cu(da)?(Launch|GraphLaunch|Memcpy|Memset)")
_NUM_ROWS = 15

NUM_PROFILED_STEPS = 5


def profile_engine(engine: Engine, batches: Sequence[Batch], device: torch.device) -> str:
    """Run ``NUM_PROFILED_STEPS`` more steps; return the summary on rank 0, an empty string elsewhere. Ranks: all."""
    assert len(batches) == NUM_PROFILED_STEPS
    parts = [
        _phases_summary(engine, batches[:2], device),
        _device_summary(engine, batches[2:4], device),
        _host_summary(engine, batches[4], device),
    ]
    return "\n\n".join(part for part in parts if part)


def _phases_summary(engine: Engine, batches: Sequence[Batch], device: torch.device) -> str:
    """List the host's milliseconds in each phase, those of the faster of two steps."""
    runs = []
    for batch in batches:
        _wait(device)
        runs.append(time_phases(engine, batch))
    _wait(device)
    if dist.get_rank() != 0:
        return ""
    best = min(runs, key=lambda run: sum(run.values()))
    phases = ", ".join(f"{phase} {ms:.2f} ms" for phase, ms in best.items())
    return f"Host, without a profiler: {phases}, together {sum(best.values()):.2f} ms"


def _device_summary(engine: Engine, batches: Sequence[Batch], device: torch.device) -> str:
    warmup, batch = batches
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    if dist.get_rank() != 0:
        for each in batches:
            engine.step(each)
        _wait(device)
        return ""
    engine.step(warmup)
    _wait(device)
    with profile(activities=activities) as profiler:
        engine.step(batch)
        _wait(device)
    kernels: dict[str, list[Interval]] = defaultdict(list)
    num_launches = 0
    for event in profiler.events():
        num_launches += event.device_type.name == "CPU" and _LAUNCH.match(event.name) is not None
        if event.device_type.name == "CUDA" and not event.is_user_annotation and not event.name.startswith("nccl:"):
            kernels[event.name].append((event.time_range.start, event.time_range.end))
    operators = profiler.key_averages().table(
        sort_by="self_cpu_time_total", row_limit=_NUM_ROWS, max_name_column_width=60
    )
    counts = f"Launches by the host: {num_launches}; {counts_summary(kernels)}"
    return f"{counts}\n{overlap_summary(kernels)}\n\nOperators by self time on the host, one step:\n{operators}"


def counts_summary(kernels: dict[str, list[Interval]]) -> str:
    """Count the kernels and copies of each kind that ran on the device."""

    def count(pattern: str) -> int:
        return sum(len(times) for name, times in kernels.items() if re.match(pattern, name))

    compute = sum(len(times) for name, times in kernels.items() if _is_compute(name))
    return (
        f"on the device: {compute} kernels of compute, {count('nccl(Dev|Symk|Kernel)')} of NCCL (symmetric: "
        f"{count('ncclSymk')}), {count('Memcpy PtoP')} peer copies, {count(_BARRIER)} barriers, {count(_SUM)} sums of pieces, {count('Memcpy (?!PtoP)')} other copies, "
        f"{count('Memset')} memsets"
    )


def overlap_summary(kernels: dict[str, list[Interval]]) -> str:
    """Return the share of communication that compute hides, and list the kernels that take most time.

    Args:
        kernels: for each kernel's name the times in microseconds at which it ran.
    """
    if not kernels:
        return "No kernels on a device."
    communication = [i for name, times in kernels.items() if _COMMUNICATION.match(name) for i in times]
    gemm = [i for name, times in kernels.items() if _is_compute(name) and _GEMM.search(name) for i in times]
    compute = [i for name, times in kernels.items() if _is_compute(name) for i in times]
    everything = [i for times in kernels.values() for i in times]
    span = max(end for _, end in everything) - min(start for start, _ in everything)
    sent = length(communication)
    lines = [
        f"Device: span {span / 1e3:.2f} ms, idle {(span - length(everything)) / 1e3:.2f} ms, compute {length(compute) / 1e3:.2f} ms "
        f"(GEMM {length(gemm) / 1e3:.2f} ms), communication {sent / 1e3:.2f} ms, exposed (communication without compute) "
        f"{(sent - overlap(communication, compute)) / 1e3:.2f} ms",
    ]
    if sent:
        lines.append(
            f"Communication overlapped with GEMMs: {overlap(communication, gemm) / sent:.1%}; with any compute: "
            f"{overlap(communication, compute) / sent:.1%}"
        )
    lines.append("Kernels by time (ms, launches, name):")
    by_time = sorted(kernels.items(), key=lambda item: -sum(end - start for start, end in item[1]))
    for name, times in by_time[:_NUM_ROWS]:
        lines.append(f"  {sum(end - start for start, end in times) / 1e3:9.3f} {len(times):6d}  {name[:110]}")
    return "\n".join(lines)


def _is_compute(name: str) -> bool:
    return not _COMMUNICATION.match(name) and not _MEMORY.match(name)


def _host_summary(engine: Engine, batch: Batch, device: torch.device) -> str:
    """List Python and C functions by self time. Backward runs on this thread, the only one that cProfile sees."""
    _wait(device)
    with torch.autograd.set_multithreading_enabled(False):
        if dist.get_rank() != 0:
            engine.step(batch)
            return ""
        with cProfile.Profile() as profiler:
            engine.step(batch)
    _wait(device)
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).strip_dirs().sort_stats("tottime").print_stats(_NUM_ROWS)
    lines = [line for line in text.getvalue().splitlines() if line.strip()]
    return "Functions by self time on the host, one step (times include the profiler's own):\n" + "\n".join(lines)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
