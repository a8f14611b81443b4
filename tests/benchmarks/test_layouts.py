"""What the layouts' page says of a profiled step."""

from __future__ import annotations

from typing import Any

from benchmarks.layouts import summarize


def _event(
    name: str, begin_ms: float, end_ms: float, *, cat: str = "kernel", args: dict[str, int] | None = None
) -> dict[str, Any]:
    duration_us = (end_ms - begin_ms) * 1e3
    return {"ph": "X", "cat": cat, "name": name, "ts": begin_ms * 1e3, "dur": duration_us, "args": args or {}}


def test_a_summary_tells_hidden_from_exposed_communication() -> None:
    events = [
        _event("nvjet_gemm", 0.0, 4.0),
        _event("ncclDevKernel_AllGather_RING", 3.0, 6.0, args={"Group size": 2}),
        _event("update_kernel", 5.0, 7.0),
        _event("ncclDevKernel_ReduceScatter_RING", 9.0, 10.0, args={"Group size": 4}),
        _event("Memcpy PtoP (Device -> Device)", 3.5, 4.5, cat="gpu_memcpy"),
        _event("aten::mm", 0.0, 99.0, cat="cpu_op"),
    ]
    assert summarize(events).splitlines() == [
        "device at work: 8.0 of 10.0 ms",
        "matrix products and attention: 4.0 ms",
        "AllGather of 2 ranks: 1, 3.0 ms, of which beside those 1.0 ms, beside any computation 2.0 ms",
        "ReduceScatter of 4 ranks: 1, 1.0 ms, of which beside those 0.0 ms, beside any computation 0.0 ms",
        "peer copies: 1, 1.0 ms, of which beside those 0.5 ms, beside any computation 0.5 ms",
        "2.0 ms, 1 of: update_kernel",
    ]


def test_a_step_without_a_device_has_nothing_to_say_of_it() -> None:
    assert summarize([]).splitlines() == ["device at work: 0.0 of 0.0 ms", "matrix products and attention: 0.0 ms"]
