"""What ran on a GPU, on which stream and when, as a profiler saw it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from megatron.core.distributed.fsdp.overlap_report import overlap

_GATHER = re.compile(r"nccl.*AllGather")
_REDUCE = re.compile(r"nccl.*ReduceScatter")
_PEER_COPY = re.compile(r"Memcpy PtoP")
_SUM_OF_PIECES = re.compile(r"sum_kernel")  # of peer copy, which may read the peers' memory itself
_GEMM = re.compile(r"gemm|nvjet|cutlass|xmma|wgmma", re.IGNORECASE)


@dataclass(frozen=True)
class Work:
    """A kernel or a copy on the device, in microseconds."""

    name: str
    stream: int
    begin: float
    end: float

    @property
    def is_gather(self) -> bool:
        """True for a kernel of NCCL that gathers."""
        return bool(_GATHER.search(self.name))

    @property
    def is_reduction(self) -> bool:
        """True for a kernel of NCCL that reduces and scatters."""
        return bool(_REDUCE.search(self.name))

    @property
    def is_peer_copy(self) -> bool:
        """True for a copy between the memories of two devices."""
        return bool(_PEER_COPY.search(self.name))

    @property
    def is_sum(self) -> bool:
        """True for the sum of what ranks have staged."""
        return bool(_SUM_OF_PIECES.search(self.name))

    @property
    def is_communication(self) -> bool:
        """True for a gather, a reduction, a copy between devices or a sum over ranks."""
        return self.is_gather or self.is_reduction or self.is_peer_copy or self.is_sum

    @property
    def is_gemm(self) -> bool:
        """True for a matrix product."""
        return bool(_GEMM.search(self.name)) and not self.is_communication


def traced(act: Callable[[], object], path: Path) -> list[Work]:
    """What ``act`` made the current device do, in order of its beginning; the trace itself is left at ``path``."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        act()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
    return read_trace(path)


def read_trace(path: Path) -> list[Work]:
    """The work in a trace of Chrome's format as torch's profiler writes it, in order of its beginning."""
    events = json.loads(path.read_text())["traceEvents"]
    found = [
        Work(event["name"], event["args"]["stream"], float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy") and event.get("ph") == "X"
    ]
    return sorted(found, key=lambda work: work.begin)


def num_overlapping(works: Sequence[Work], others: Sequence[Work], *, at_least_us: float = 5.0) -> int:
    """How many of ``works`` ran while one of ``others`` did, for so many microseconds altogether."""
    spans = [(other.begin, other.end) for other in others]
    return sum(overlap([(work.begin, work.end)], spans) >= at_least_us for work in works)


def streams_of(works: Sequence[Work]) -> set[int]:
    """The streams that they ran on."""
    return {work.stream for work in works}
