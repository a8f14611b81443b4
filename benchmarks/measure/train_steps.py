"""A scope in which the steps of the trainer are timed and kept, and one of them is profiled."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from megatron.training.loop.train_step import StepRecord, TrainStep


class TrainSteps:
    """A scope that wraps ``TrainStep.__call__``.

    Args:
        is_cuda: steps run on a GPU, whose events time them; else the host's clock does, and none is profiled.
        profiled: which step is profiled, on rank 0.

    Attributes:
        records: of the steps.
        host_ms: of each step, until its Python has returned.
        trace: what the profiler says of the profiled step: events of Chrome's format.
    """

    def __init__(
        self, is_cuda: bool, *, profiled: int, activities: Sequence[ProfilerActivity] = (ProfilerActivity.CUDA,)
    ) -> None:
        self.is_cuda, self._profiled, self._activities = is_cuda, profiled, activities
        self.records: list[StepRecord] = []
        self.host_ms: list[float] = []
        self.trace: list[dict[str, Any]] = []
        self._marks: list[Any] = []
        self._step = TrainStep.__call__

    def __enter__(self) -> TrainSteps:
        steps = self

        def step(own: TrainStep, *arguments: Any) -> StepRecord:
            return steps._call(own, *arguments)

        TrainStep.__call__ = step  # type: ignore[method-assign,assignment]
        return self

    def __exit__(self, *_: object) -> None:
        TrainStep.__call__ = self._step  # type: ignore[method-assign]

    def milliseconds(self) -> list[float]:
        """Return the times between the ends of steps; blocks until the last one has ended."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if not self.is_cuda:
            return [(end - begin) * 1e3 for begin, end in pairs]
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in pairs]

    def _call(self, own: TrainStep, *arguments: Any) -> StepRecord:
        begin = time.perf_counter()
        is_profiled = self.is_cuda and len(self.records) == self._profiled and dist.get_rank() == 0
        record = self._run_profiled(own, *arguments) if is_profiled else self._step(own, *arguments)
        self.records.append(record)
        self.host_ms.append((time.perf_counter() - begin) * 1e3)
        if self.is_cuda:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())
        return record

    def _run_profiled(self, own: TrainStep, *arguments: Any) -> StepRecord:
        torch.cuda.synchronize()
        with profile(activities=self._activities) as profiler:
            record = self._step(own, *arguments)
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            self.trace = json.loads(path.read_text())["traceEvents"]
        return record
