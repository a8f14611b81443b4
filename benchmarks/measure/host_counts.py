"""Count the host's work in the phases of a step: Python calls and lines of the engine, operators, collectives, waits.

Counts are the same in every run, so a test can assert them; times on a busy machine are not.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import megatron.core.distributed.fsdp
from megatron.core.distributed.fsdp.comm.streams import CudaStreams, Edge, Mark, Role, Streams
from megatron.core.distributed.fsdp.runtime import context as context_module

ENGINE = str(Path(megatron.core.distributed.fsdp.__file__).parent)
PHASES = ("forward", "backward", "step")
# Calls of the CUDA runtime and driver, as a profiler names them.
_LAUNCH = re.compile(r"^(cuda|cu)(Launch|Memcpy|Memset)")


@dataclass
class Counts:
    """What the host did, by phase; ``by_function`` and ``lines_by_function`` by (phase, file.function) of the engine.

    Attributes:
        calls: Python functions of the engine that were called; a generator counts each time it resumes.
        lines: lines of the engine that ran, in a loop once for each turn.
        builtins: functions written in C that the engine called.
        other_calls: Python functions outside of the engine.
        ops: operators of PyTorch that were dispatched, views included.
        kernels: operators that are no views; on a device each launches a kernel.
        dtensor_ops: operators on DTensors.
        launches: kernels, copies and fills that were launched on a device.
        collectives: operators of torch.distributed.
        events: events recorded.
        waits: waits of a stream for an event.
    """

    calls: Counter[str] = field(default_factory=Counter)
    lines: Counter[str] = field(default_factory=Counter)
    builtins: Counter[str] = field(default_factory=Counter)
    other_calls: Counter[str] = field(default_factory=Counter)
    ops: Counter[str] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)
    dtensor_ops: Counter[str] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)
    collectives: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    by_function: Counter[tuple[str, str]] = field(default_factory=Counter)
    lines_by_function: Counter[tuple[str, str]] = field(default_factory=Counter)


class Tally:
    """Counters that fill ``counts`` under the phase that began last."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.phase = "none"

    def begin(self, phase: str) -> None:
        """Count what follows as part of ``phase``."""
        self.phase = phase

    @contextmanager
    def calls(self) -> Iterator[None]:
        """Count Python calls on this thread in a scope. Backward must run on it too."""
        counts = self.counts

        def on_event(frame: FrameType, event: str, argument: Any) -> None:
            is_engine = frame.f_code.co_filename.startswith(ENGINE)
            if event == "call":
                if is_engine:
                    counts.calls[self.phase] += 1
                    counts.by_function[self.phase, _name(frame.f_code)] += 1
                else:
                    counts.other_calls[self.phase] += 1
            elif event == "c_call" and is_engine:
                counts.builtins[self.phase] += 1

        with torch.autograd.set_multithreading_enabled(False):
            previous = sys.getprofile()
            sys.setprofile(on_event)
            try:
                yield
            finally:
                sys.setprofile(previous)

    @contextmanager
    def lines(self) -> Iterator[None]:
        """Count lines of the engine that run on this thread in a scope: unlike calls, they show loops."""
        counts = self.counts

        def on_line(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
            if event == "line":
                counts.lines[self.phase] += 1
                counts.lines_by_function[self.phase, _name(frame.f_code)] += 1
            return on_line

        def on_call(frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
            return on_line if frame.f_code.co_filename.startswith(ENGINE) else None

        with torch.autograd.set_multithreading_enabled(False):
            previous = sys.gettrace()
            sys.settrace(on_call)
            try:
                yield
            finally:
                sys.settrace(previous)

    @contextmanager
    def operators(self) -> Iterator[None]:
        """Count operators in a scope, those of torch.distributed as collectives."""
        with torch.autograd.set_multithreading_enabled(False), _OperatorTally(self):
            yield

    def count_launches(self, step: Callable[[Callable[[str], None]], None]) -> None:
        """Run a step and count what it launches on the device. ``step`` calls its argument when a phase begins."""
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler, ExitStack() as phase:

            def begin(name: str) -> None:
                phase.close()
                phase.enter_context(record_function(f"phase {name}"))

            step(begin)
            torch.cuda.synchronize()
        # Scopes are listed a second time, on the device's time line.
        events = [event for event in profiler.events() or () if event.device_type.name == "CPU"]
        phases = [(e.name.removeprefix("phase "), e.time_range) for e in events if e.name.startswith("phase ")]
        for event in events:
            if _LAUNCH.match(event.name):
                for name, span in phases:
                    if span.start <= event.time_range.start < span.end:
                        self.counts.launches[name] += 1

    def streams(self) -> AbstractContextManager[Any]:
        """Let contexts that are made in the scope count their streams' events and waits, also after the scope."""
        return patch.object(context_module, "make_streams", self._make_streams)

    def _make_streams(self, device: torch.device, **_: Any) -> Any:
        return _CountingCudaStreams(device, self) if device.type == "cuda" else _CountingHostStreams(self)


class _OperatorTally(TorchDispatchMode):
    def __init__(self, tally: Tally) -> None:
        super().__init__()
        self._tally = tally

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        counts, phase = self._tally.counts, self._tally.phase
        if func.namespace == "c10d":
            counts.collectives[phase] += 1
        else:
            counts.ops[phase] += 1
            if not _is_view(func):
                counts.kernels[phase] += 1
            if any(isinstance(leaf, DTensor) for leaf in tree_leaves((args, kwargs))):
                counts.dtensor_ops[phase] += 1
        return func(*args, **(kwargs or {}))


def _is_view(func: Any) -> bool:
    """Return whether the operator only returns a view of its input."""
    return any(a.alias_info is not None and not a.alias_info.is_write for a in func._schema.arguments)


class _CountedMark(Mark):
    """A mark that counts, in one call as on a device."""

    __slots__ = ()
    _streams: _CountingHostStreams

    def record(self, role: Role) -> None:
        tally = self._streams.tally
        tally.counts.events[tally.phase] += 1
        self.event, self.is_pending = role, True

    def wait(self, edge: Edge) -> None:
        if self.is_pending:
            self.is_pending = False
            tally = self._streams.tally
            tally.counts.waits[tally.phase] += 1


class _CountingHostStreams(Streams):
    """Streams on a CPU that count the events and waits that a device would get."""

    mark_class = _CountedMark

    def __init__(self, tally: Tally) -> None:
        super().__init__()
        self.tally = tally

    def wait(self, edge: Edge, event: Any) -> None:
        if event is not None:
            self.tally.counts.waits[self.tally.phase] += 1


class _CountingCudaStreams(CudaStreams):
    mark_class = Mark  # which asks its streams; the device's own marks do not

    def __init__(self, device: torch.device, tally: Tally) -> None:
        super().__init__(device)
        self._tally = tally

    def record(self, role: Role, again: torch.cuda.Event | None = None) -> torch.cuda.Event:
        self._tally.counts.events[self._tally.phase] += 1
        return super().record(role, again)

    def wait(self, edge: Edge, event: torch.cuda.Event | None) -> None:
        if event is not None:
            self._tally.counts.waits[self._tally.phase] += 1
        super().wait(edge, event)


def _name(code: CodeType) -> str:
    return f"{Path(code.co_filename).stem}.{code.co_qualname.removeprefix('<locals>.')}"
