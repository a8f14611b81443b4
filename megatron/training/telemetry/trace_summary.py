"""Summary in text of a trace of torch's profiler, since the trace of a large model is too big for a browser.

``python -m megatron.training.telemetry.trace_summary FILE`` prints it for a trace that is there already.
"""

from __future__ import annotations

import gzip
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron.core.distributed.fsdp.overlap_report import Interval
from megatron.core.regular_file import open_regular, parse_json
from megatron.training.telemetry.kernel_times import counts_summary, overlap_summary

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
# Calls of the runtime or driver that launch a kernel, a copy or a whole graph, and those that wait for the device.
_LAUNCH = re.compile(r"^cu(da)?(Launch|GraphLaunch|Memcpy|Memset)")
_WAIT = re.compile(r"^cu(da)?(Device|Stream|Event|Ctx)Synchronize")
_NUM_KERNELS, _NUM_OPERATORS = 40, 20


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Return the events of a trace file, gzipped or not."""
    with open_regular(path) as file:
        text = gzip.decompress(file.read()) if path.suffix == ".gz" else file.read()
    return list(parse_json(text)["traceEvents"])


def summarize_trace(events: Iterable[dict[str, Any]], *, num_steps: int = 1) -> str:
    """Summarize a trace: the device's work, how far communication hides behind compute, and the host's time.

    Args:
        events: those of the trace, in Chrome's format.
        num_steps: steps that the trace holds; times are sums over them.
    """
    kernels: dict[str, list[Interval]] = defaultdict(list)
    threads: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
    for event in events:
        if event.get("ph") != "X":
            continue
        begin = float(event["ts"])
        end = begin + float(event["dur"])
        if event.get("cat") in _DEVICE:
            kernels[event["name"]].append((begin, end))
        elif event.get("cat") in _HOST:
            threads[event["tid"]].append((begin, end, event["name"]))
    parts = [f"Sums over {num_steps} steps; a step is {_span(threads, kernels) / 1e3 / num_steps:.2f} ms."]
    parts.append(_host_summary(threads))
    if kernels:
        parts.append(counts_summary(kernels))
    parts.append(overlap_summary(kernels, num_rows=_NUM_KERNELS))
    parts.append(_operators(threads))
    return "\n".join(parts)


def _span(threads: dict[Any, list[tuple[float, float, str]]], kernels: dict[str, list[Interval]]) -> float:
    times = [(begin, end) for work in threads.values() for begin, end, _ in work]
    times += [when for of_name in kernels.values() for when in of_name]
    return max((end for _, end in times), default=0.0) - min((begin for begin, _ in times), default=0.0)


def _host_summary(threads: dict[Any, list[tuple[float, float, str]]]) -> str:
    def times(pattern: re.Pattern[str]) -> list[float]:
        return [end - begin for work in threads.values() for begin, end, name in work if pattern.match(name)]

    launches, waits = times(_LAUNCH), times(_WAIT)
    return (
        f"Host: {len(launches)} launches, {sum(launches) / 1e3:.2f} ms in them; {len(waits)} waits for the device, "
        f"{sum(waits) / 1e3:.2f} ms in them"
    )


def _operators(threads: dict[Any, list[tuple[float, float, str]]]) -> str:
    """List operators and calls of the runtime by the host's time in them, without that in what they call."""
    own: dict[str, list[float]] = defaultdict(list)
    for work in threads.values():
        for name, duration in _self_times(work):
            own["Python outside of operators" if name.startswith("ProfilerStep#") else name].append(duration)
    ranked = sorted(own.items(), key=lambda item: -sum(item[1]))[:_NUM_OPERATORS]
    lines = ["Operators by self time on the host (ms, calls, name):"]
    lines += [f"  {sum(times) / 1e3:9.3f} {len(times):6d}  {name[:110]}" for name, times in ranked]
    return "\n".join(lines)


def _self_times(work: Sequence[tuple[float, float, str]]) -> list[tuple[str, float]]:
    """Return (name, duration without what it encloses) of one thread's work."""
    order = sorted(work, key=lambda each: (each[0], -each[1]))
    own = [end - begin for begin, end, _ in order]
    open_indices: list[int] = []
    for index, (begin, end, _) in enumerate(order):
        while open_indices and order[open_indices[-1]][1] <= begin:
            open_indices.pop()
        if open_indices:
            own[open_indices[-1]] -= min(end, order[open_indices[-1]][1]) - begin
        open_indices.append(index)
    return [(name, duration) for (_, _, name), duration in zip(order, own, strict=True)]


if __name__ == "__main__":
    print(summarize_trace(read_trace(Path(sys.argv[1]))))
