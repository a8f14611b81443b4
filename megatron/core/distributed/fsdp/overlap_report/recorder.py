"""Watch one step of training, and write the report of where its time and memory went.

[Note: three steps for one report] A profiler that records what the host does slows the host down, and where the host is the
bottleneck, the step. So on a CUDA device the report of step N takes three steps. Step N - 2 is recorded with the host's operators
and the engine's marks, which tell for each kernel the unit that it is for, and with its allocations. Steps N - 1 and N are recorded
with the device's work alone; each kernel is that of step N - 2 in the same place. Step N begins when the device has ended
the work of step N - 1, so it is a step in the middle of training, with all that the host has launched ahead. A CUDA graph has no
marks when it is replayed; there the step that tells the units is an eager one before the capture. Without a device there
is one step, and its times are the host's.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch._C._profiler import _RecordFunctionFast
from torch.autograd.profiler import profile as profile_of_autograd
from torch.profiler import ProfilerActivity, profile

from megatron.core.distributed.fsdp.api.module import contexts_of
from megatron.core.distributed.fsdp.overlap_report.facts import counting_bytes, watching_memory
from megatron.core.distributed.fsdp.overlap_report.figures import find_figures
from megatron.core.distributed.fsdp.overlap_report.memory import memory_stack
from megatron.core.distributed.fsdp.overlap_report.report import check_folder, make_report, write_report
from megatron.core.distributed.fsdp.overlap_report.trace import Trace, Work, read_events, transfer
from megatron.core.distributed.fsdp.runtime import nvtx
from megatron.core.distributed.fsdp.runtime.context import FsdpContext
from megatron.core.distributed.fsdp.runtime.unit import FsdpUnit

DEFAULT_STEP = 12
"""Steps after the first one of a run, for the report: order and addresses are planned, kernels chosen, graphs captured."""

_NUM_TIMED = 20

logger = logging.getLogger(__name__)


class OverlapReport:
    """Writes the report of one step of a sharded model into a folder: ``overlap.html``, ``.png`` and ``.json``.

    Put each step of training (forward, backward and update) into ``step()``. Steps that are not watched cost two looks at the
    clock; [Note: three steps for one report] has those that are.

    ::

        report = OverlapReport("report", model, step=12)
        for batch in batches:
            with report.step():
                model(batch).backward()
                optimizer.step()
                optimizer.zero_grad()

    Args:
        folder: made if it is not there. Rank 0 writes.
        model: holds units of ``fully_shard``.
        step: which step to report, counted from 1; None: the twelfth from the first one on.
        first: number of the first step, if that is not 1.
        captured_after: eager steps before the step is captured as a CUDA graph; None: it is not captured.

    Attributes:
        path: the page, once it is written, on rank 0. Where it could not be, training goes on with a warning.

    Raises:
        TypeError: a number of a step is none.
        ValueError: the step cannot be reported, since the steps that are watched with it would come too early.
        OSError: the folder cannot be written, on rank 0.

    Ranks: all of the process group, alike. Blocks the host around watched steps.
    """

    _in_step: ClassVar[OverlapReport | None] = None

    def __init__(
        self,
        folder: str | Path,
        model: nn.Module | FsdpContext,
        *,
        step: int | None = None,
        first: int = 1,
        captured_after: int | None = None,
    ) -> None:
        for name, number in (("step", step), ("first", first), ("captured_after", captured_after)):
            if not (isinstance(number, int) or (number is None and name != "first")):
                raise TypeError(f"{name} of an overlap report must be a whole number, got {number!r}")
        self.folder, self._model = Path(folder), model
        self._number = first
        self.reported = first + DEFAULT_STEP - 1 if step is None else step
        self._device = contexts_of(model)[0].device
        self._is_cuda = self._device.type == "cuda"
        self._is_captured = self._is_cuda and captured_after is not None
        earliest, self._units_step = first, self.reported
        if self._is_cuda and captured_after is None:
            earliest, self._units_step = first + 2, self.reported - 2
        elif self._is_cuda and captured_after is not None:
            earliest, self._units_step = first + captured_after + 2, first + captured_after - 1
        if self.reported < earliest:
            raise ValueError(
                f"the step of an overlap report must be at least {earliest}, got {self.reported}: training begins with step {first}, and "
                "the report needs steps before it to know which unit each kernel is for; ask for a later one"
            )
        if not dist.is_initialized() or dist.get_rank() == 0:
            check_folder(self.folder)
        self._begins: list[float] = []
        self._units: _Units | None = None
        self._recording = ExitStack()  # of the step before the reported one, and of the reported one
        self._recorded: profile | None = None
        self._boundary_ns = 0  # when the reported one began on the host
        self.path: Path | None = None

    @property
    def is_done(self) -> bool:
        """Whether the step has been reported."""
        return self._number > self.reported

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run the next step in the scope. There is no report if one raises of those that are watched for it.

        Raises:
            RuntimeError: it is in another report's step, or in its own; or another profiler runs in a step that is watched.
        """
        number = self._number
        if number > self.reported:
            yield
            return
        if OverlapReport._in_step is not None:
            which = "its own" if OverlapReport._in_step is self else "another report's"
            raise RuntimeError(
                f"a step of an overlap report must be in no other one, got one in {which}: a process has one profiler; use one "
                "report at a time, with step() once around each step"
            )
        OverlapReport._in_step = self
        self._begins = [*self._begins[-_NUM_TIMED:], time.perf_counter()]
        self._number += 1
        try:
            with self._watch(number):
                yield
        except BaseException:
            self._abort(number)
            raise
        finally:
            OverlapReport._in_step = None
        if number == self.reported:
            self._finish()

    def _abort(self, number: int) -> None:
        """Give the report up if it needs this step, which was aborted."""
        self._recording.close()
        if number >= self._units_step:
            self._units = self._recorded = None
            self._number = self.reported + 1

    def _watch(self, number: int) -> AbstractContextManager[None]:
        if number == self._units_step:
            return self._watching_units()
        if self._is_cuda and number == self.reported - 1:
            self._recorded = self._recording.enter_context(_recording(self._device, [ProfilerActivity.CUDA]))
        self._boundary_ns = time.time_ns()
        return nullcontext()

    @contextmanager
    def _watching_units(self) -> Iterator[None]:
        """Record from which the unit of each kernel is known, and where memory goes."""
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._is_cuda else [])]
        contexts = contexts_of(self._model)
        with (
            _recording(self._device, activities, profile_memory=True) as recorded,
            watching_memory(contexts, self._device) as known,
            _marked(),
            counting_bytes(contexts) as nbytes,
        ):
            begin = time.time_ns()
            yield
            _wait(self._device)
            end = time.time_ns()
        base, events = _events(recorded)
        trace, window = read_events(events, is_cuda=self._is_cuda), ((begin - base) / 1e3, (end - base) / 1e3)
        known.named = [((when - base) / 1e3, address, kind) for when, address, kind in known.named]
        memory = memory_stack(events, trace, known, device_type=1 if self._is_cuda else 0, window=window)
        self._units = _Units(trace, window, nbytes, memory)

    def _usual_ms(self) -> float | None:
        """Return the median of the steps before those that were watched, from begin to begin."""
        num_watched = 3 if self._is_cuda else 1
        begins = self._begins[: len(self._begins) - num_watched + 1]
        periods = [later - earlier for earlier, later in itertools.pairwise(begins)]
        return statistics.median(periods) * 1e3 if periods else None

    def _finish(self) -> None:
        units = self._units
        assert units is not None
        works, window, calls, notes = units.trace.works, units.window, units.trace.calls, list[str]()
        if self._recorded is not None:
            works, window, calls, notes = self._times(self._recorded, units.trace)
        report = make_report(
            find_figures(works, window, nbytes=units.nbytes, calls=calls),
            iteration=self.reported,
            device=self._device,
            is_captured=self._is_captured,
            usual_ms=self._usual_ms(),
            memory=units.memory,
            memory_of=self._units_step,
            notes=notes,
        )
        self._units = self._recorded = None
        try:
            self.path = write_report(report, self.folder)
        except OSError as error:
            logger.warning("the overlap report of step %d could not be written: %s", self.reported, error)

    def _times(
        self, recorded: profile, units: Trace
    ) -> tuple[list[Work], tuple[float, float], list[tuple[float, float]], list[str]]:
        """Return the works with units, the reported step's begin and end, the host's calls, and notes for readers."""
        _wait(self._device)
        if not self._is_captured and _can_let_go():
            # The profiler lets go of the process when it ends; else all later launches take longer.
            os.environ.setdefault("TEARDOWN_CUPTI", "1")
        self._recording.close()
        _launch_a_little(self._device)  # CUPTI lets go in the calls of CUDA that follow
        base, events = _events(recorded)
        trace = read_events(events, is_cuda=True)
        boundary = (self._boundary_ns - base) / 1e3
        before = [work for work in trace.works if work.launched < boundary]
        own = [work for work in trace.works if work.launched >= boundary]
        works, (own_works, share) = transfer(units.works, before)[0], transfer(units.works, own)
        notes = []
        if share < 0.98:
            notes.append(
                f"{1 - share:.0%} of the device's time is of kernels that the step with marks did not run in the same place; it "
                "counts as outside of units"
            )
        begin = max((work.end for work in before), default=boundary)
        end = max((work.end for work in own), default=begin)
        return [*works, *own_works], (begin, end), trace.calls, notes


@dataclass(frozen=True)
class _Units:
    """The step from which the unit of each kernel is known."""

    trace: Trace
    window: tuple[float, float]
    nbytes: Mapping[tuple[str, str, str], int]
    memory: dict[str, Any]


class _Marks(threading.local):
    """Shows the engine's marks to torch's profiler."""

    def __init__(self) -> None:
        self._open: list[Any] = []

    def push(self, name: str) -> None:
        mark = _RecordFunctionFast(getattr(name, "own", name))
        mark.__enter__()
        self._open.append(mark)

    def pop(self) -> None:
        self._open.pop().__exit__(None, None, None)

    def begin(self, name: nvtx.UnitRange) -> None:
        # Backwards of units overlap, but the profiler's records must nest. So record only the beginning.
        with _RecordFunctionFast(name.own):
            pass

    def end(self) -> None:
        pass


@contextmanager
def _marked() -> Iterator[None]:
    """Show the engine's marks, and also where a backward begins to compute a unit's forward again."""
    marks, enter = _Marks(), FsdpContext.enter_forward

    def enter_marked(context: FsdpContext, unit: FsdpUnit) -> bool:
        is_again = enter(context, unit)
        if is_again:
            marks.begin(unit.backward_range)
        return is_again

    with patch.object(FsdpContext, "enter_forward", enter_marked), nvtx.shown_to(marks):
        yield


@contextmanager
def _recording(
    device: torch.device, activities: list[ProfilerActivity], *, profile_memory: bool = False
) -> Iterator[profile]:
    """Record on all ranks at once, warm: what a profiler does first takes long.

    Raises:
        RuntimeError: a profiler runs. One that begins within the scope gets such an error, too: torch has one profiler in a
            process, and a second one would end it with a segmentation fault.
    """
    if torch._C._autograd._profiler_enabled():
        raise RuntimeError(
            "no profiler of torch may run when the steps of an overlap report begin, got one that runs: a process has one profiler; "
            "end it before, or report another step"
        )
    recorded = profile(activities=activities, profile_memory=profile_memory)
    recorded.prepare_trace()
    _launch_a_little(device)
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1, device=device))
    _wait(device)
    recorded.start_trace()
    try:
        # Each way to begin a profile leads to one of these, also of one that was made before.
        with (
            patch.object(profile_of_autograd, "_prepare_trace", _refuse),
            patch.object(profile_of_autograd, "_start_trace", _refuse),
        ):
            yield recorded
    finally:
        recorded.stop_trace()


def _refuse(*args: Any, **named: Any) -> NoReturn:
    raise RuntimeError(
        "no profiler of torch may begin while an overlap report records its steps, got a second one: a process has one profiler; "
        "profile other steps, or make one report at a time"
    )


def _launch_a_little(device: torch.device) -> None:
    for _ in range(3):
        torch.ones(8, device=device).sum()
    _wait(device)


def _can_let_go() -> bool:
    """Return whether CUPTI, through which torch's profiler records, can be detached and attached again: from CUDA 12.6 on."""
    version = torch.version.cuda
    return version is not None and tuple(map(int, version.split(".")[:2])) >= (12, 6)


def _events(recorded: profile) -> tuple[int, list[dict[str, Any]]]:
    """Return the nanoseconds since 1970 at which the trace's clock is 0, and its events."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
    return int(trace["baseTimeNanoseconds"]), trace["traceEvents"]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
