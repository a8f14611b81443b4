"""The measurements of the transport "auto", made once at start-up.

Measured of each transport, as the slowest rank sees it: the time of an all-gather and of a reduce-scatter of each
buffer size alone, and how much longer GEMMs take while gathers and reductions of the largest size run on another
stream.

The transport of the least cost is picked: the sum of these times, times the factor by which GEMMs take longer. Exposed
communication costs its time; hidden communication slows the GEMMs by the SMs and the memory bandwidth that it takes. On
4 x H200 both NCCL and copies gather equally fast, but beside NCCL's ring kernels GEMMs take 1.33 times as long, beside
copies 1.12 times. An earlier transport of the table is kept unless a later one is 3 % cheaper.
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

# Sizes to measure where none are known: a small layer in bf16, and a layer of a model with 32 B parameters.
_GUESSED_NBYTES = (8 * 2**20, 128 * 2**20)
_SMALLEST_NBYTES, _LARGEST_NBYTES = 2**20, 512 * 2**20
# The buffers of one measurement (unsharded, reduce-scatter input, and their shards) take less than three times a size.
_SHARE_OF_FREE_MEMORY = 8
_REPEATS = 5
_GEMM_ROWS, _NUM_GEMMS = 4096, 24
# Communication beside the GEMMs takes this many times as long as they do alone, so that it goes on until they end.
_COVER = 1.5
# A later transport must cost less than this share of an earlier one: noise must not pick another one at every start.
_CLEAR_GAIN = 0.97

_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Figures:
    """The measurements of one transport, of the slowest rank."""

    gather_ms: tuple[float, ...]
    """All-gather of each size, alone."""

    reduce_ms: tuple[float, ...]
    """Reduce-scatter of each size, alone, into fp32."""

    gemm_factor: float
    """GEMMs take this many times as long beside gathers and reductions of the largest size."""

    @property
    def cost_ms(self) -> float:
        """The sum of all times, times the GEMMs' factor."""
        return (sum(self.gather_ms) + sum(self.reduce_ms)) * self.gemm_factor


def cheapest(figures: Mapping[str, Figures]) -> str:
    """Return the transport of the least cost, or an earlier one that costs hardly more."""
    names = list(figures)
    best = names[0]
    for name in names[1:]:
        if figures[name].cost_ms < _CLEAR_GAIN * figures[best].cost_ms:
            best = name
    return best


def sizes_to_measure(wanted_nbytes: Sequence[int], free_nbytes: int) -> list[int]:
    """Return the wanted sizes, or a guess, ascending, limited to what is worth measuring and fits in memory."""
    limit = max(_SMALLEST_NBYTES, min(_LARGEST_NBYTES, free_nbytes // _SHARE_OF_FREE_MEMORY))
    return sorted({min(max(_SMALLEST_NBYTES, nbytes), limit) for nbytes in wanted_nbytes or _GUESSED_NBYTES})


def describe(figures: Mapping[str, Figures], sizes_nbytes: Sequence[int]) -> str:
    """Return one line with the figures of all transports, in the order of their cost."""
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
    """Measure each transport between the ranks of a process group, on an otherwise idle CUDA device.

    Args:
        makers: a function for each name that makes the transport.
        sizes_nbytes: bytes of the unsharded buffers; a guess where it is empty.

    Returns:
        The figures by name, the errors of transports that failed by name, the sizes, and the seconds that it took.
        Figures and sizes are the same on all ranks.

    Raises:
        RuntimeError: all transports failed.

    Ranks: all of the process group; blocks the host for less than a second. A transport that fails must fail on all
    ranks.
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
        torch.cuda.empty_cache()  # training needs buffers of other sizes
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
    # From figures that all ranks share, since they must take part in equally many rounds.
    num_rounds = max(1, math.ceil(_COVER * gemms_ms / (gather_ms[-1] + reduce_ms[-1])))
    beside_ms = _greatest(group, device, [_beside_ms(buffers, sizes_nbytes[-1], num_rounds, gemms)])[0]
    return Figures(tuple(gather_ms), tuple(reduce_ms), max(1.0, beside_ms / gemms_ms))


class _Buffers:
    """The buffers of a measurement, with random numbers: zeros would draw less power than weights do."""

    def __init__(self, transport: Transport, device: torch.device, nbytes: int) -> None:
        self.transport = transport
        numel = self._numel(nbytes)
        self.shard = transport.empty(numel // transport.size, _DTYPE, device, MemoryKind.SHARD)
        self.full = transport.empty(numel, _DTYPE, device, MemoryKind.UNSHARDED)
        self.input = transport.empty(numel, _DTYPE, device, MemoryKind.REDUCE_SCATTER_INPUT)
        self.out = torch.empty(numel // transport.size, dtype=torch.float32, device=device)
        self.shard.normal_()
        self.input.normal_()
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
        self.transport.reduce_scatter(out, self.input[:numel], scale=1 / self.transport.size)


class _Gemms:
    """A fixed number of GEMMs on random numbers."""

    def __init__(self, device: torch.device) -> None:
        self.a, self.b = (torch.randn(_GEMM_ROWS, _GEMM_ROWS, device=device, dtype=_DTYPE) for _ in range(2))
        self.out = torch.empty_like(self.a)

    def run(self) -> None:
        for _ in range(_NUM_GEMMS):
            torch.mm(self.a, self.b, out=self.out)


def _time_ms(call: Callable[[], None], repeats: int) -> float:
    """Return the milliseconds of a call on the current stream, after two calls to warm up."""
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
    """Return the milliseconds of the GEMMs beside communication on a stream of high priority, as in training."""
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
    """Return the greatest of the ranks' values. Ranks: all of the process group, which thereby synchronise."""
    agreed = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
    greatest: list[float] = agreed.tolist()
    return greatest


def _free_nbytes(device: torch.device) -> int:
    """Return the bytes that can be allocated: free on the device, or cached by this process."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
