"""Profile one step: how far communication hides behind compute, and where the host spends its time.

Only a summary in text is written: the trace of a large model has gigabytes.
"""

from __future__ import annotations

import cProfile
import io
import pstats
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks.engines.engine import Batch, Engine
from benchmarks.measure.phases import time_phases
from megatron.training.telemetry.trace_summary import read_trace, summarize_trace

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
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        return summarize_trace(read_trace(trace))


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
