"""Time an engine's steps for comparison: each between barriers and synchronisations, the slowest rank counts."""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from benchmarks.engines.engine import Batch, Engine, MemoryPlan
from benchmarks.measure.memory import MemoryWatch

GIB = 2**30


@dataclass(kw_only=True)
class Measurement:
    """Measurements of one engine: [S] entries are steps, warm-up included; memory is the most of any rank, in bytes."""

    name: str
    num_warmup: int
    losses: list[float] = field(default_factory=list)
    """Mean over ranks and microbatches."""
    grad_norms: list[float] = field(default_factory=list)
    """Empty unless asked for."""
    step_ms: list[float] = field(default_factory=list)
    """Of the slowest rank."""
    host_ms: list[float] = field(default_factory=list)
    """Until the step's Python returns, of the slowest rank."""
    row_ms: float = 0.0
    """A step's share of several that follow each other without a wait between them, of the slowest rank."""
    peak_allocated: int = 0
    """By PyTorch's allocator, from construction to the end."""
    peak_reserved: int = 0
    outside: int = 0
    """The most that was allocated past PyTorch's allocator."""
    steady_allocated: int = 0
    """Peak of the last step of the warm-up and of the measured ones: a CUDA graph allocates when it is captured."""
    steady_reserved: int = 0
    at_rest: int = 0
    """In use after the last step, above what was before the engine was built."""
    plan: MemoryPlan | None = None
    """What the engine said of this rank's memory."""

    @property
    def peak(self) -> int:
        """The most bytes in use, allocated by PyTorch or past it."""
        return self.peak_allocated + self.outside

    @property
    def reserved(self) -> int:
        """The most bytes taken from the device."""
        return self.peak_reserved + self.outside

    @property
    def median_ms(self) -> float:
        return statistics.median(self.step_ms[self.num_warmup :])

    @property
    def min_ms(self) -> float:
        return min(self.step_ms[self.num_warmup :])

    @property
    def median_host_ms(self) -> float:
        return statistics.median(self.host_ms[self.num_warmup :])


def make_batch(
    step: int, *, num_microbatches: int, num_tokens: int, vocab_size: int, seed: int, device: torch.device
) -> Batch:
    """Make the tokens of one step of this rank: a function of seed, step, microbatch and rank, alike for all engines.

    Small token numbers are more frequent (as the cube of a uniform number), so that there is something to learn and
    the loss of a faulty engine departs from a correct one's.
    """
    batch = []
    for index in range(num_microbatches):
        key = ((seed * 100_003 + step) * 1_009 + index) * 4_099 + dist.get_rank()
        uniform = torch.rand(1, num_tokens + 1, generator=torch.Generator().manual_seed(key))
        tokens = (uniform.pow(3) * vocab_size).long().clamp_(max=vocab_size - 1).to(device)
        batch.append((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
    return batch


def run_steps(
    engine: Engine,
    batches: list[Batch],
    measurement: Measurement,
    device: torch.device,
    *,
    memory: MemoryWatch,
    with_norm: bool,
) -> None:
    """Run a step for each batch; add times, losses and memory to ``measurement``. Ranks: all; blocks.

    With ``with_norm`` each step also computes the gradient's norm, inside its time.
    """
    for index, batch in enumerate(batches):
        if index == measurement.num_warmup - 1:
            memory.begin_steady()
            # What exists now stays: else a collection of the whole heap would fall into some step of some engine.
            gc.collect()
            gc.freeze()
        _barrier(device)
        _synchronize(device)
        started = time.perf_counter()
        loss, norm = engine.step(batch, with_norm=with_norm)
        returned = time.perf_counter()
        _synchronize(device)
        ended = time.perf_counter()
        memory.note()
        times = _max_over_ranks([(ended - started) * 1e3, (returned - started) * 1e3], device)
        measurement.step_ms.append(times[0])
        measurement.host_ms.append(times[1])
        dist.all_reduce(loss)
        measurement.losses.append(loss.item() / dist.get_world_size())
        if norm is not None:
            measurement.grad_norms.append(norm.item())
    gc.unfreeze()
    measurement.plan = engine.memory_plan()
    _take_over(memory, measurement, device)


def run_in_a_row(engine: Engine, batches: list[Batch], measurement: Measurement, device: torch.device) -> None:
    """Time steps in a row, without waiting between them, into ``measurement``. Ranks: all; blocks.

    As in training, the host runs ahead, and work that a step leaves to the next forward is hidden there.
    """
    _barrier(device)
    _synchronize(device)
    started = time.perf_counter()
    for batch in batches:
        engine.step(batch)
    _synchronize(device)
    elapsed = (time.perf_counter() - started) * 1e3 / len(batches)
    (measurement.row_ms,) = _max_over_ranks([elapsed], device)


def _take_over(memory: MemoryWatch, measurement: Measurement, device: torch.device) -> None:
    names = ("peak_allocated", "peak_reserved", "steady_allocated", "steady_reserved", "at_rest")
    peaks = _max_over_ranks([*(getattr(memory, name) for name in names), memory.peak_outside], device)
    for name, peak in zip((*names, "outside"), peaks, strict=True):
        setattr(measurement, name, int(peak))


def _max_over_ranks(values: list[float] | list[int], device: torch.device) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


def _barrier(device: torch.device) -> None:
    if device.type == "cuda":
        dist.barrier(device_ids=[device.index])
    else:
        dist.barrier()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
