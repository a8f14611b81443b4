"""Reading traces: kernels and copies alone, told apart by name, with the streams that they ran on."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.device_trace import Work, num_overlapping, read_trace, streams_of

_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
_SYMMETRIC = "ncclSymkDevKernel_ReduceScatter_LD_bf16(ncclSymkDevWorkArgs)"


def _event(name: str, category: str, stream: int, begin: float, duration: float) -> dict[str, object]:
    """As Kineto writes it."""
    arguments = {"External id": 3, "device": 0, "context": 1, "stream": stream, "correlation": 9}
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 0,
        "tid": stream,
        "ts": begin,
        "dur": duration,
        "args": arguments,
    }


def test_a_trace_is_read_in_the_order_of_time(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    events = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
        _event("nvjet_tst_128x256_64x4_2x1_v_bz_TNT", "kernel", 7, 20.0, 30.0),
        _event(_GATHER, "kernel", 20, 10.5, 20.0),
        _event("nccl:_all_gather_base", "gpu_user_annotation", 20, 10.0, 21.0),
        _event("Memcpy PtoP (Device -> Device)", "gpu_memcpy", 24, 60.0, 5.0),
        _event(_SYMMETRIC, "kernel", 28, 70.0, 5.0),
        _event("cudaLaunchKernel", "cuda_runtime", 0, 1.0, 2.0),
    ]
    file.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    works = read_trace(file)
    assert [work.stream for work in works] == [20, 7, 24, 28]
    gather, gemm, copy, reduction = works
    assert (gather.is_gather, gather.is_reduction, gather.is_gemm) == (True, False, False)
    assert gemm.is_gemm and not gemm.is_communication
    assert copy.is_peer_copy and copy.is_communication and not copy.is_gemm
    assert reduction.is_reduction and reduction.is_communication
    assert (gather.begin, gather.end) == (10.5, 30.5)
    assert streams_of(works) == {7, 20, 24, 28}


def test_overlap_is_counted_once_for_each_work_and_not_for_an_instant() -> None:
    gathers = [Work(_GATHER, 20, begin, begin + 10) for begin in (0.0, 20.0, 40.0)]
    gemms = [Work("gemm", 7, 4.0, 7.0), Work("gemm", 7, 7.0, 9.0), Work("gemm", 7, 28.0, 31.0)]
    assert num_overlapping(gathers, gemms) == 1
    assert num_overlapping(gathers, gemms, at_least_us=2.0) == 2
