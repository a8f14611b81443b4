"""Which transport is fastest on this machine: measured once, at start-up, and told with the figures.

What counts is a step, not a collective: communication is hidden behind GEMMs, which it slows down by the SMs and the
memory bandwidth that it takes. On 4 x H200, NCCL's ring kernels make GEMMs take 1.33 times as long, copies 1.12 times,
while both gather equally fast. So the cost of a transport is the time of a gather and a reduction, times what GEMMs beside
them take longer: where they are exposed the first factor is lost, where they are hidden the excess of the second.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core.distributed.fsdp.comm.transport import MemoryKind, Transport

# Sizes to measure where none are known: a small layer of a model in bf16, and a layer of 32 B parameters' models.
_GUESSED_NBYTES = (8 * 2**20, 128 * 2**20)
_SMALLEST_NBYTES, _LARGEST_NBYTES = 2**20, 512 * 2**20
# The buffers of one measurement (gathered, staged, and their shards) take less than three times a size.
_SHARE_OF_FREE_MEMORY = 8
_REPEATS = 5
_GEMM_ROWS, _NUM_GEMMS = 4096, 24
# Communication goes on for this much longer than the GEMMs beside it, alone, so that it covers them all.
_COVER = 1.5
# A transport must be better than a simpler one by this factor: noise must not choose another one on every start.
_CLEAR_GAIN = 0.97

_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Figures:
    """What was measured of a transport; of the slowest rank."""

    gather_ms: tuple[float, ...]
    """All-gather of each size, alone."""

    reduce_ms: tuple[float, ...]
    """Reduce-scatter of each size, alone, into fp32."""

    gemm_factor: float
    """GEMMs take this many times as long beside gathers and reductions of the largest size."""

    @property
    def cost_ms(self) -> float:
        """The sum over the sizes of what a gather and a reduction cost a step."""
        return (sum(self.gather_ms) + sum(self.reduce_ms)) * self.gemm_factor


def cheapest(figures: Mapping[str, Figures]) -> str:
    """The transport of least cost; an earlier one where a later one is hardly better."""
    names = list(figures)
    best = names[0]
    for name in names[1:]:
        if figures[name].cost_ms < _CLEAR_GAIN * figures[best].cost_ms:
            best = name
    return best


def sizes_to_measure(wanted_nbytes: Sequence[int], free_nbytes: int) -> list[int]:
    """The wanted sizes, or a guess, in ascending order, within what is worth measuring and what memory allows."""
    limit = max(_SMALLEST_NBYTES, min(_LARGEST_NBYTES, free_nbytes // _SHARE_OF_FREE_MEMORY))
    return sorted({min(max(_SMALLEST_NBYTES, nbytes), limit) for nbytes in wanted_nbytes or _GUESSED_NBYTES})


def describe(figures: Mapping[str, Figures], sizes_nbytes: Sequence[int]) -> str:
    """One line with the figures of all transports, in the order of their cost."""
    sizes = " and ".join(f"{nbytes / 2**20:.0f}" for nbytes in sizes_nbytes)
    rows = [
        f"{name} {_milliseconds(each.gather_ms)} / {_milliseconds(each.reduce_ms)} ms, GEMMs x {each.gemm_factor:.2f}, "
        f"cost {each.cost_ms:.2f}"
        for name, each in sorted(figures.items(), key=lambda item: item[1].cost_ms)
    ]
    return f"gather / reduction of {sizes} MiB: {'; '.join(rows)}"


def _milliseconds(times: Sequence[float]) -> str:
    return " and ".join(f"{ms:.2f}" for ms in times)


def measure(
    makers: Mapping[str, Callable[[], Transport]],
    group: ProcessGroup,
    device: torch.device,
    sizes_nbytes: Sequence[int],
) -> tuple[dict[str, Figures], dict[str, str], list[int], float]:
    """Times each transport between the ranks of a group, on an otherwise idle CUDA device.

    Args:
        makers: what makes each transport, by name.
        sizes_nbytes: bytes of the gathered buffers; a guess where it is empty.

    Returns:
        The figures by name, why the others failed by name, the sizes, and the seconds that it took; the first three are
        the same on all ranks.

    Raises:
        RuntimeError: all transports failed.

    Ranks: all of the group; blocks the host, for less than a second. A transport that fails must do so on all alike.
    """
    with torch.cuda.device(device), torch.no_grad():
        free = -int(_greatest(group, device, [-float(_free_nbytes(device))])[0])
        begin = time.perf_counter()
        sizes = sizes_to_measure(sizes_nbytes, free)
        gemms = _Gemms(device)
        figures: dict[str, Figures] = {}
        failed: dict[str, str] = {}
        for name, make in makers.items():
            try:
                measured: Figures | str = _measure_one(make(), group, device, sizes, gemms)
            except RuntimeError as error:
                measured = " ".join(str(error).split())
            if _greatest(group, device, [float(isinstance(measured, str))])[0]:
                failed[name] = measured if isinstance(measured, str) else "it failed on another rank"
            else:
                assert isinstance(measured, Figures)
                figures[name] = measured
        if not figures:
            raise RuntimeError(f"a transport must work between ranks of {group.size()}, and all failed: {failed}")
        del gemms
        torch.cuda.empty_cache()  # what was measured with is of no use to training
    return figures, failed, sizes, time.perf_counter() - begin


def _measure_one(
    transport: Transport, group: ProcessGroup, device: torch.device, sizes_nbytes: Sequence[int], gemms: _Gemms
) -> Figures:
    buffers = _Buffers(transport, device, sizes_nbytes[-1])
    times = [
        _time_ms(lambda call=call, nbytes=nbytes: call(nbytes), _REPEATS)  # type: ignore[misc]
        for call in (buffers.gather, buffers.reduce)
        for nbytes in sizes_nbytes
    ]
    *alone, gemms_ms = _greatest(group, device, [*times, _time_ms(gemms.run, 1)])
    gather_ms, reduce_ms = alone[: len(sizes_nbytes)], alone[len(sizes_nbytes) :]
    # From agreed figures: all ranks must take part in as many.
    num_rounds = max(1, math.ceil(_COVER * gemms_ms / (gather_ms[-1] + reduce_ms[-1])))
    beside_ms = _greatest(group, device, [_beside_ms(buffers, sizes_nbytes[-1], num_rounds, gemms)])[0]
    return Figures(tuple(gather_ms), tuple(reduce_ms), max(1.0, beside_ms / gemms_ms))


class _Buffers:
    """What a transport moves while it is measured: random numbers, since zeros draw less power than weights do."""

    def __init__(self, transport: Transport, device: torch.device, nbytes: int) -> None:
        self.transport = transport
        numel = self._numel(nbytes)
        self.shard = transport.empty(numel // transport.size, _DTYPE, device, MemoryKind.SHARD)
        self.full = transport.empty(numel, _DTYPE, device, MemoryKind.UNSHARDED)
        self.staging = transport.empty(numel, _DTYPE, device, MemoryKind.REDUCE_SCATTER_INPUT)
        self.out = torch.empty(numel // transport.size, dtype=torch.float32, device=device)
        self.shard.normal_()
        self.staging.normal_()
        transport.publish()

    def _numel(self, nbytes: int) -> int:
        share = 64 * self.transport.size
        return -(-nbytes // (share * _DTYPE.itemsize)) * share

    def gather(self, nbytes: int) -> None:
        numel = self._numel(nbytes)
        self.transport.all_gather(self.full[:numel], self.shard[: numel // self.transport.size])

    def reduce(self, nbytes: int) -> None:
        numel = self._numel(nbytes)
        out = self.out[: numel // self.transport.size]
        self.transport.reduce_scatter(out, self.staging[:numel], scale=1 / self.transport.size)


class _Gemms:
    """A fixed number of GEMMs on random numbers."""

    def __init__(self, device: torch.device) -> None:
        self.a, self.b = (torch.randn(_GEMM_ROWS, _GEMM_ROWS, device=device, dtype=_DTYPE) for _ in range(2))
        self.out = torch.empty_like(self.a)

    def run(self) -> None:
        for _ in range(_NUM_GEMMS):
            torch.mm(self.a, self.b, out=self.out)


def _time_ms(call: Callable[[], None], repeats: int) -> float:
    """Milliseconds of a call on the current stream, after it was warmed up."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):
        call()
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    elapsed: float = start.elapsed_time(end)
    return elapsed / repeats


def _beside_ms(buffers: _Buffers, nbytes: int, num_rounds: int, gemms: _Gemms) -> float:
    """Milliseconds of the GEMMs while gathers and reductions go on, on a stream of high priority as in training."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    compute, communication = torch.cuda.current_stream(), torch.cuda.Stream(priority=-1)
    communication.wait_stream(compute)
    with torch.cuda.stream(communication):
        for _ in range(num_rounds):
            buffers.gather(nbytes)
            buffers.reduce(nbytes)
    start.record()
    gemms.run()
    end.record()
    compute.wait_stream(communication)
    compute.synchronize()
    elapsed: float = start.elapsed_time(end)
    return elapsed


def _greatest(group: ProcessGroup, device: torch.device, values: Sequence[float]) -> list[float]:
    """The greatest of the ranks' values, the same on all of them, which thereby meet. Ranks: all of the group."""
    agreed = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
    greatest: list[float] = agreed.tolist()
    return greatest


def _free_nbytes(device: torch.device) -> int:
    """Bytes that can be allocated: unused by the device, or cached by this process."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
