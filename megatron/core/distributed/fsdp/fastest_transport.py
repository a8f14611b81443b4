"""The fastest transport between the ranks of a process group, for ``transport="auto"``.

"auto" measures each transport once at start-up, as the slowest rank sees it: the time of an all-gather and of a reduce-scatter
of each buffer size alone, and how much longer GEMMs take while gathers and reductions of the largest size run on another stream.
The transport of the least cost is picked: the sum of these times, times the factor by which GEMMs take longer. Exposed
communication costs its time; hidden communication slows the GEMMs by the SMs and the memory bandwidth that it takes. On
4 x H200 both NCCL and copies gather equally fast, but next to NCCL's ring kernels GEMMs take 1.33 times as long, next to
copies 1.12 times.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core.distributed.fsdp.comm.choose import TRANSPORTS, transport_problem
from megatron.core.distributed.fsdp.comm.process_group import greatest
from megatron.core.distributed.fsdp.comm.transport import MemoryKind, Transport

# Sizes to measure where none are known: a small layer in bf16, and a layer of a model with 32 B parameters.
_GUESSED_NBYTES = (8 * 2**20, 128 * 2**20)
_SMALLEST_NBYTES, _LARGEST_NBYTES = 2**20, 512 * 2**20
# The buffers of one measurement (unsharded, reduce-scatter input, and their shards) take less than three times a size.
_SHARE_OF_FREE_MEMORY = 8
_REPEATS = 5
_GEMM_ROWS, _NUM_GEMMS = 4096, 24
# Communication concurrent with the GEMMs takes this many times as long as they do alone, so that it goes on until they end.
_COVER = 1.5
# A later transport must cost less than this share of an earlier one: noise must not pick another one at every start.
_CLEAR_GAIN = 0.97
_DTYPE = torch.bfloat16


def fastest_transport(
    group: ProcessGroup, gather_group: ProcessGroup, device: torch.device, nbytes: Sequence[int] = ()
) -> str:
    """Return the kind of the transport that costs least, which global rank 0 prints with the reason.

    With deterministic algorithms nothing is measured: it is the last one in the table that can serve the ranks.

    Args:
        nbytes: sizes of the buffers to be gathered and reduced, as far as they are known; none: a guess.

    Ranks: all of ``group``; all get the same answer. Blocks.
    """
    problems = {kind: transport_problem(kind, group, device) for kind in TRANSPORTS}
    kinds = [kind for kind, problem in problems.items() if problem is None]
    why = [f"{kind} cannot serve: {problem}" for kind, problem in problems.items() if problem is not None]
    if len(kinds) == 1:
        chosen = kinds[0]
    elif torch.are_deterministic_algorithms_enabled():
        # Times might choose another one on the next start, whose sums have another order.
        chosen = kinds[-1]
        why.insert(0, "not measured, since deterministic algorithms are asked for")
    else:
        # Training needs both communicators anyway; a first collective makes one, which takes longer than to measure it.
        dist.all_reduce(torch.zeros(1, device=device), group=gather_group)
        figures, failed, sizes, seconds = measure(kinds, group, gather_group, device, nbytes)
        chosen = cheapest(figures)
        why = [describe(figures, sizes), f"measured in {seconds:.1f} s", *why]
        why += [f"{kind} failed: {error}" for kind, error in failed.items()]
    if dist.get_rank() == 0:
        print(f"fsdp transport: {chosen} between {group.size()} ranks; {'; '.join(why)}", flush=True)
    return chosen


@dataclass(frozen=True)
class Figures:
    """The measurements of one transport, of the slowest rank."""

    gather_ms: tuple[float, ...]
    """All-gather of each size, alone."""

    reduce_ms: tuple[float, ...]
    """Reduce-scatter of each size, alone, into fp32."""

    gemm_factor: float
    """GEMMs take this many times as long during gathers and reductions of the largest size."""

    @property
    def cost_ms(self) -> float:
        """The sum of all times, times the GEMMs' factor."""
        return (sum(self.gather_ms) + sum(self.reduce_ms)) * self.gemm_factor


def cheapest(figures: Mapping[str, Figures]) -> str:
    """Return the transport of the least cost, or an earlier one that costs hardly more."""
    best, *later = figures
    for name in later:
        if figures[name].cost_ms < _CLEAR_GAIN * figures[best].cost_ms:
            best = name
    return best


def sizes_to_measure(wanted_nbytes: Sequence[int], free_nbytes: int) -> list[int]:
    """Return the wanted sizes, or a guess, ascending, limited to what is worth measuring and fits in memory."""
    limit = max(_SMALLEST_NBYTES, min(_LARGEST_NBYTES, free_nbytes // _SHARE_OF_FREE_MEMORY))
    return sorted({min(max(_SMALLEST_NBYTES, nbytes), limit) for nbytes in wanted_nbytes or _GUESSED_NBYTES})


def describe(figures: Mapping[str, Figures], sizes_nbytes: Sequence[int]) -> str:
    """Return one line with the figures of all transports, in the order of their cost."""
    rows = [
        f"{name} {_joined(each.gather_ms)} / {_joined(each.reduce_ms)} ms, GEMMs x {each.gemm_factor:.2f}, "
        f"cost {each.cost_ms:.2f}"
        for name, each in sorted(figures.items(), key=lambda item: item[1].cost_ms)
    ]
    sizes = _joined([nbytes / 2**20 for nbytes in sizes_nbytes], digits=0)
    return f"gather / reduction of {sizes} MiB: {'; '.join(rows)}"


def _joined(numbers: Sequence[float], digits: int = 2) -> str:
    return " and ".join(f"{number:.{digits}f}" for number in numbers)


def measure(
    kinds: Sequence[str], group: ProcessGroup, gather_group: ProcessGroup, device: torch.device, nbytes: Sequence[int]
) -> tuple[dict[str, Figures], dict[str, str], list[int], float]:
    """Measure each kind of transport between the ranks of a process group, on an otherwise idle CUDA device.

    Args:
        nbytes: sizes of the unsharded buffers; a guess where it is empty.

    Returns:
        The figures by kind, the errors of transports that failed by kind, the sizes, and the seconds that it took.
        Figures and sizes are the same on all ranks.

    Raises:
        RuntimeError: all transports failed.

    Ranks: all of the process group; blocks the host for less than a second. A transport that fails must fail on all
    ranks.
    """
    with torch.cuda.device(device), torch.no_grad():
        # What can be allocated: free on the device, or cached by this process.
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        # The least of the ranks': all must measure the same sizes.
        free = -int(greatest([-(torch.cuda.mem_get_info(device)[0] + cached)], [group], device)[0])
        begin = time.perf_counter()
        sizes = sizes_to_measure(nbytes, free)
        matrices = (torch.randn(_GEMM_ROWS, _GEMM_ROWS, device=device, dtype=_DTYPE) for _ in range(3))
        multiply = functools.partial(_multiply, *matrices)
        figures: dict[str, Figures] = {}
        failed: dict[str, str] = {}
        for kind in kinds:
            try:
                transport = TRANSPORTS[kind].make(group, gather_group, device)
                figures[kind] = _measure_one(transport, group, device, sizes, multiply)
            except RuntimeError as error:
                failed[kind] = " ".join(str(error).split())
            # All ranks must go on to the next transport together, also where it failed on some of them.
            if greatest([kind in failed], [group], device)[0]:
                failed.setdefault(kind, "it failed on another rank")
                figures.pop(kind, None)
        if not figures:
            raise RuntimeError(f"a transport must work between ranks of {group.size()}, and all failed: {failed}")
        del multiply
        torch.cuda.empty_cache()  # training needs buffers of other sizes
    return figures, failed, sizes, time.perf_counter() - begin


def _multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    for _ in range(_NUM_GEMMS):
        torch.mm(a, b, out=out)


def _measure_one(
    transport: Transport, group: ProcessGroup, device: torch.device, sizes: Sequence[int], multiply: Callable[[], None]
) -> Figures:
    size = transport.size
    numels = [-(-nbytes // (64 * size * _DTYPE.itemsize)) * 64 for nbytes in sizes]  # of a shard
    # Random numbers: zeros would draw less power than weights do.
    shard = transport.empty(numels[-1], _DTYPE, device, MemoryKind.SHARD).normal_()
    full = transport.empty(numels[-1] * size, _DTYPE, device, MemoryKind.UNSHARDED)
    grads = transport.empty(numels[-1] * size, _DTYPE, device, MemoryKind.REDUCE_SCATTER_INPUT).normal_()
    out = torch.empty(numels[-1], dtype=torch.float32, device=device)
    transport.publish()

    def gather(numel: int) -> None:
        transport.all_gather(full[: numel * size], shard[:numel])

    def reduce(numel: int) -> None:
        transport.reduce_scatter(out[:numel], grads[: numel * size], scale=1 / size)

    times = [_time_ms(functools.partial(call, numel), _REPEATS) for call in (gather, reduce) for numel in numels]
    *alone, gemms_ms = greatest([*times, _time_ms(multiply, 1)], [group], device)
    gather_ms, reduce_ms = alone[: len(sizes)], alone[len(sizes) :]
    # From figures that all ranks share, since they must take part in equally many rounds.
    num_rounds = max(1, math.ceil(_COVER * gemms_ms / (gather_ms[-1] + reduce_ms[-1])))
    rounds = [functools.partial(call, numels[-1]) for _ in range(num_rounds) for call in (gather, reduce)]
    concurrent_ms = greatest([_concurrent_ms(rounds, multiply)], [group], device)[0]
    return Figures(tuple(gather_ms), tuple(reduce_ms), max(1.0, concurrent_ms / gemms_ms))


def _time_ms(call: Callable[[], None], repeats: int, *, num_warmups: int = 2) -> float:
    """Return the milliseconds of a call on the current stream, after calls to warm up."""
    for _ in range(num_warmups):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / repeats


def _concurrent_ms(rounds: Sequence[Callable[[], None]], multiply: Callable[[], None]) -> float:
    """Return the milliseconds of the GEMMs during communication on a stream of high priority, as in training."""
    communication = torch.cuda.Stream(priority=-1)
    # The buffers were filled on the current stream.
    communication.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(communication):
        for call in rounds:
            call()
    gemms_ms = _time_ms(multiply, 1, num_warmups=0)
    torch.cuda.synchronize()
    return gemms_ms
