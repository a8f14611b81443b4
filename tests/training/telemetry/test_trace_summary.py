"""The summary of a trace, from events as torch's profiler writes them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from megatron.training.telemetry.trace_summary import read_trace, summarize_trace


def _event(cat: str, name: str, ts: float, dur: float, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid, "args": {}}


_EVENTS = [
    _event("cpu_op", "aten::linear", 0.0, 5000.0),
    _event("cpu_op", "aten::mm", 1000.0, 3000.0),
    _event("cuda_runtime", "cudaLaunchKernel", 1500.0, 500.0),
    _event("cuda_driver", "cuLaunchKernelEx", 2500.0, 500.0),
    _event("cuda_runtime", "cudaStreamSynchronize", 6000.0, 2000.0),
    _event("cpu_op", "aten::mm", 1000.0, 1000.0, tid=2),
    _event("kernel", "nvjet_tst_128", 2000.0, 4000.0, tid=7),
    _event("kernel", "ncclDevKernel_AllGather_RING_LL(args)", 4000.0, 4000.0, tid=20),
    _event("gpu_user_annotation", "nccl:_all_gather_base", 4000.0, 4000.0, tid=20),
    _event("gpu_memset", "Memset (Device)", 9000.0, 1000.0, tid=7),
    {"ph": "i", "cat": "cpu_op", "name": "an instant", "ts": 0.0},
]


def test_summary_has_device_time_idle_share_overlap_and_the_host() -> None:
    """Annotations of NCCL are no kernels; time of an operator is without that of the operators in it."""
    lines = summarize_trace(_EVENTS, num_steps=2).splitlines()
    assert lines[0] == "Sums over 2 steps; a step is 5.00 ms."
    assert lines[1] == "Host: 2 launches, 1.00 ms in them; 1 waits for the device, 2.00 ms in them"
    assert lines[2].startswith("on the device: 1 kernels of compute, 1 of NCCL (symmetric: 0)")
    assert lines[3].startswith(
        "Device: span 8.00 ms, idle 1.00 ms (12.5%), compute 4.00 ms (GEMM 4.00 ms), communication 4.00 ms"
    )
    assert lines[3].endswith("exposed (communication without compute) 2.00 ms")
    assert lines[4] == "Communication overlapped with GEMMs: 50.0%; with any compute: 50.0%"
    rows = lines[lines.index("Operators by self time on the host (ms, calls, name):") + 1 :]
    operators = {row.split(maxsplit=2)[2]: float(row.split()[0]) for row in rows}
    assert operators == {
        "aten::mm": 3.0,
        "aten::linear": 2.0,
        "cudaStreamSynchronize": 2.0,
        "cudaLaunchKernel": 0.5,
        "cuLaunchKernelEx": 0.5,
    }


def test_forty_kernels_are_listed() -> None:
    events = [_event("kernel", f"kernel_{i}", 10.0 * i, float(i + 1)) for i in range(50)]
    lines = summarize_trace(events).splitlines()
    listed = [line.split()[2] for line in lines if "kernel_" in line]
    assert listed == [f"kernel_{i}" for i in reversed(range(10, 50))]


def test_a_trace_is_read_gzipped_or_not(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": _EVENTS})
    (tmp_path / "a.json").write_text(text)
    with gzip.open(tmp_path / "a.json.gz", "wt") as file:
        file.write(text)
    assert read_trace(tmp_path / "a.json") == read_trace(tmp_path / "a.json.gz") == _EVENTS
