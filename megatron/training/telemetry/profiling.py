"""Profiles of chosen steps, and the memory snapshot after them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile, schedule

from megatron.core.distributed.fsdp.overlap_report import OverlapReport, check_folder
from megatron.training.telemetry.memory_history import MemoryHistory
from megatron.training.telemetry.trace_summary import read_trace, summarize_trace


@dataclass(frozen=True, kw_only=True)
class ProfilingConfig:
    """Settings of profiles and of the record of memory."""

    profile: bool = False
    """Profile the steps after ``step_start`` up to and with ``step_end``."""

    step_start: int = 10
    step_end: int = 12
    ranks: tuple[int, ...] = ()
    """Ranks to profile; empty: all."""

    use_pytorch_profiler: bool = False
    """Profile with torch's profiler; else the steps are marked for an nsys that is started around the process."""

    collect_shapes: bool = False
    collect_callstack: bool = False
    collect_chakra: bool = False
    """Write torch's execution trace of these steps too."""

    nvtx_ranges: bool = False
    """Mark profiled iterations; what the engine does is always marked."""

    record_shapes: bool = False
    """Mark operators with the shapes of their inputs, for nsys."""

    record_memory_history: bool = False
    memory_snapshot_path: str = "snapshot.pickle"
    """File of a rank's snapshot, with ``_<rank>`` before its suffix."""

    overlap_report: str | None = None
    """Folder of the overlap report of one iteration; None: there is none."""

    overlap_report_step: int | None = None
    """That iteration; None: the twelfth of the run."""

    trace_folder: str = "torch_profile"
    chakra_folder: str = "chakra"

    def __post_init__(self) -> None:
        if self.profile and not 0 <= self.step_start < self.step_end:
            raise ValueError(
                "--profile-step-end must be greater than --profile-step-start, which must not be negative, got "
                f"{self.step_end} and {self.step_start}"
            )
        if self.overlap_report_step is not None and self.overlap_report_step < 1:
            raise ValueError(f"--overlap-report-step must be at least 1, got {self.overlap_report_step}")
        if self.use_pytorch_profiler and self.record_shapes:
            raise ValueError(
                "--record-shapes is of nsys; with --use-pytorch-profiler give --pytorch-profiler-collect-shapes"
            )

    def has(self, rank: int) -> bool:
        """Return whether this rank is profiled."""
        return not self.ranks or rank in self.ranks


class StepProfiler:
    """Profiles the configured steps of this rank, which must be one of ``config.ranks``.

    ``before_step`` and ``after_step`` are called around every step; steps that are not profiled cost a comparison each.

    Args:
        memory: the record of memory, whose snapshot is taken after the last profiled step; None: there is none.

    Ranks: each its own; does not communicate.
    """

    def __init__(self, config: ProfilingConfig, device: torch.device, memory: MemoryHistory | None) -> None:
        self.config, self.device, self.memory = config, device, memory
        self._tool: _TorchProfile | _NsysRange | None = None
        if config.profile:
            self._tool = (_TorchProfile if config.use_pytorch_profiler else _NsysRange)(config, device)

    def before_step(self, iteration: int) -> None:
        """Begin what is due before the step after ``iteration``."""
        if self._tool is not None and iteration < self.config.step_end:
            self._tool.before_step(iteration)

    def after_step(self, iteration: int) -> None:
        """End what is due after the step that completed ``iteration``."""
        if iteration == self.config.step_end:
            self.finish()

    def finish(self) -> None:
        """Write what has not been written yet; later calls do nothing."""
        tool, self._tool = self._tool, None
        if tool is not None:
            tool.end()
        memory, self.memory = self.memory, None
        if memory is not None:
            memory.write_snapshot()


class _TorchProfile:
    """A run of torch's profiler over the steps, its trace file and the summary beside it."""

    def __init__(self, config: ProfilingConfig, device: torch.device) -> None:
        self.config, self.device, self.rank = config, device, dist.get_rank()
        self.num_steps = 0
        self._profile: profile | None = None
        self._observer: ExecutionTraceObserver | None = None
        if config.collect_chakra:
            file = _file_of_rank(config.chakra_folder, self.rank)
            self._observer = ExecutionTraceObserver().register_callback(str(file))

    def before_step(self, iteration: int) -> None:
        if self._profile is None:
            if iteration >= self.config.step_start - 1:
                self._start(iteration)
        else:
            self._profile.step()
        self.num_steps += iteration >= self.config.step_start

    def _start(self, iteration: int) -> None:
        # The first step that a profiler sees is slow, so one more goes before those that are kept.
        warms_up = iteration < self.config.step_start
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=self.config.step_end - iteration - 1) if warms_up else None,
            record_shapes=self.config.collect_shapes,
            with_stack=self.config.collect_callstack,
            execution_trace_observer=self._observer,
        )
        self._profile.start()

    def end(self) -> None:
        if self._profile is None or self.num_steps == 0:
            print(f" rank {self.rank}: nothing is profiled, since training {_not_reached(self.config)}", flush=True)
            return
        _wait(self.device)
        self._profile.stop()
        if self._observer is not None:
            self._observer.unregister_callback()
        file = _file_of_rank(self.config.trace_folder, self.rank)
        self._profile.export_chrome_trace(str(file))
        summary = file.with_name(f"rank-{self.rank}.txt")
        summary.write_text(summarize_trace(read_trace(file), num_steps=self.num_steps) + "\n")
        print(
            f" rank {self.rank}: the trace of {self.num_steps} steps is in {file}, its summary in {summary}", flush=True
        )


class _NsysRange:
    """The range of steps that an nsys with ``--capture-range=cudaProfilerApi`` captures."""

    def __init__(self, config: ProfilingConfig, device: torch.device) -> None:
        self.config, self.is_cuda = config, device.type == "cuda"
        self._began = self._in_iteration = False
        self._marks: AbstractContextManager[object] | None = None

    def before_step(self, iteration: int) -> None:
        if not self.is_cuda or iteration < self.config.step_start:
            return
        if not self._began:
            self._began = True
            torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStart())
            if self.config.record_shapes:
                self._marks = torch.autograd.profiler.emit_nvtx(record_shapes=True)
                self._marks.__enter__()
        if self.config.nvtx_ranges:
            self._end_iteration()
            torch.cuda.nvtx.range_push(f"iteration {iteration + 1}")
            self._in_iteration = True

    def _end_iteration(self) -> None:
        if self._in_iteration:
            torch.cuda.nvtx.range_pop()
            self._in_iteration = False

    def end(self) -> None:
        if not self._began:
            return
        self._end_iteration()
        torch.cuda.synchronize()
        torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStop())
        if self._marks is not None:
            self._marks.__exit__(None, None, None)


def _not_reached(config: ProfilingConfig) -> str:
    return f"has no iteration after --profile-step-start {config.step_start} up to --profile-step-end {config.step_end}"


def _file_of_rank(folder: str, rank: int) -> Path:
    Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(folder) / f"rank-{rank}.json.gz"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def check_report_folder(config: ProfilingConfig) -> None:
    """Check that the overlap report can be written, before training comes to its iteration.

    Raises:
        OSError: it cannot.

    Ranks: 0.
    """
    if config.overlap_report is None:
        return
    try:
        check_folder(Path(config.overlap_report))
    except OSError as error:
        raise OSError(
            f"--overlap-report {config.overlap_report} must be a folder that rank 0 can write to, got: {error}; give another one"
        ) from error


def overlap_report(
    config: ProfilingConfig, model: nn.Module, *, first: int, captured_after: int | None
) -> OverlapReport | None:
    """Return what reports an iteration of this run; None where that is not asked, or the iteration is over.

    Args:
        first: the run's first iteration.
        captured_after: its eager iterations before the capture of a CUDA graph; None: there is no capture.
    """
    if config.overlap_report is None:
        return None
    try:
        return OverlapReport(
            config.overlap_report, model, step=config.overlap_report_step, first=first, captured_after=captured_after
        )
    except ValueError as error:
        if dist.get_rank() == 0:
            print(f" there will be no overlap report: {error}", flush=True)
        return None


def start_profiler(config: ProfilingConfig, device: torch.device) -> StepProfiler | None:
    """Begin to record memory, and return the profiler of this rank's steps; None where nothing is to be done on it.

    Ranks: each its own. Call it before the model is built, whose memory is to be in the record.
    """
    if not config.has(dist.get_rank()):
        return None
    memory = None
    if config.record_memory_history and device.type == "cuda":
        memory = MemoryHistory(config.memory_snapshot_path, device)
    elif config.record_memory_history:
        _say_once(config, f"--record-memory-history is of CUDA devices: nothing is recorded on a {device.type} device")
    if config.profile and not config.use_pytorch_profiler and device.type != "cuda":
        _say_once(
            config,
            f"--profile without --use-pytorch-profiler marks steps for nsys: it sees nothing on a {device.type} device",
        )
    return StepProfiler(config, device, memory) if config.profile or memory is not None else None


def _say_once(config: ProfilingConfig, text: str) -> None:
    if dist.get_rank() == min(config.ranks, default=0):
        print(f" {text}", flush=True)
