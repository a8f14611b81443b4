"""Time an optimizer's update beside the next forward: ``python3 benchmarks/update_probe.py``, on one CUDA device.

The forward of a GPT's layers on one stream, AdamW's update of as many flat shards on another; a layer waits for its shard. Prints
milliseconds of both alone, one after the other, and beside each other: the engine's kernel, which fills the device, and one of few
programs that loop over blocks, each of which holds one multiprocessor, with and without products that leave these alone.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

if __package__ in (None, ""):  # started as a file: what it imports lies above it
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import triton
import triton.language as tl

from megatron.core.distributed.fsdp.flat_optimizer.adamw_kernel import (
    BLOCK_NUMEL,
    NUM_WARPS,
    _store,
    _update,
)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _looping_kernel(  # type: ignore[no-untyped-def]
    main, grad, exp_avg, exp_avg_sq, remainder, coefficients, num_blocks, BLOCK: tl.constexpr
):
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        offsets = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        w = _update(main, grad, exp_avg, exp_avg_sq, remainder, coefficients, offsets, None, True)
        _store(main, remainder, main, w, offsets, None, True, False)


class Shard:
    """The state of one unit's update: [numel] flats."""

    def __init__(self, numel: int) -> None:
        self.numel = numel
        self.main = torch.randn(numel, device="cuda").bfloat16()
        self.grad = torch.randn(numel, device="cuda").bfloat16()
        self.remainder = torch.zeros(numel, device="cuda", dtype=torch.int16)
        self.exp_avg, self.exp_avg_sq = torch.zeros(2, numel, device="cuda")
        self.coefficients = torch.tensor([1.0, 0.1, 0.99, 0.01, -1e-5, 1.0, 1e-8, 1.0, 0.0], device="cuda")

    def update(self, programs: int) -> None:
        """Update with so many programs of 1,024 threads; 0: with the engine's of 128, one for each block."""
        state = (self.main, self.grad, self.exp_avg, self.exp_avg_sq, self.remainder, self.coefficients)
        block, warps = (4096, 32) if programs else (BLOCK_NUMEL, NUM_WARPS)
        blocks = self.numel // block
        _looping_kernel[(programs or blocks,)](*state, blocks, BLOCK=block, num_warps=warps, enable_fp_fusion=False)


class Layer:
    """Weights of a layer of Llama's kind."""

    def __init__(self, width: int, ffn: int, groups: int) -> None:
        def weight(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * 0.02

        self.heads, self.groups = width // 128, groups
        self.qkv = weight(width + 2 * groups * 128, width)
        self.proj, self.up, self.down = weight(width, width), weight(2 * ffn, width), weight(width, ffn)
        self.norm = torch.ones(width, device="cuda", dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens, width = x.shape
        qkv = F.linear(F.rms_norm(x, (width,), self.norm), self.qkv)
        q, k, v = (
            part.view(1, tokens, -1, 128).transpose(1, 2)
            for part in qkv.split([width, self.groups * 128, self.groups * 128], dim=1)
        )
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + F.linear(heads.transpose(1, 2).reshape(tokens, width), self.proj)
        gate, up = F.linear(F.rms_norm(x, (width,), self.norm), self.up).chunk(2, dim=1)
        return x + F.linear(F.silu(gate) * up, self.down)


def _blas() -> Callable[[int], None]:
    """Return what tells cuBLAS how many multiprocessors its products may use (0: all)."""
    torch.mm(*torch.randn(2, 64, 64, device="cuda"))
    with open("/proc/self/maps") as maps:
        path = next(line.split()[-1] for line in maps if "libcublas.so" in line)
    library = ctypes.CDLL(path)
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())

    def limit(count: int) -> None:
        status = library.cublasSetSmCountTarget(handle, ctypes.c_int(count))
        assert status == 0, f"cublasSetSmCountTarget returned {status}"

    return limit


def main() -> None:
    """Print the table. Ranks: one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--ranks", type=int, default=2, help="over which the weights are sharded")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    layers = [Layer(4096, 14336, 8) for _ in range(arguments.layers)]
    numel = (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336) // arguments.ranks // 8192 * 8192
    shards = [Shard(numel) for _ in layers]
    x = torch.randn(arguments.tokens, 4096, device="cuda", dtype=torch.bfloat16)
    limit = _blas()
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count

    def forward(limited: int = 0) -> None:
        y = x
        limit(limited)
        for layer in layers:
            y = layer.forward(y)
        limit(0)

    def beside(stream: torch.cuda.Stream, programs: int, limited: int = 0, share: float = 1.0) -> None:
        events = []
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for shard in shards:
                shard.update(programs)
                events.append(torch.cuda.Event())
                events[-1].record()
        y = x
        for index, layer in enumerate(layers):
            limit(limited if index < share * len(layers) else 0)
            events[index].wait()
            y = layer.forward(y)
        limit(0)

    def update(programs: int = 0) -> None:
        for shard in shards:
            shard.update(programs)

    def timed(function: Callable[[], None]) -> float:
        times = []
        for turn in range(arguments.repeats + 2):
            torch.cuda.synchronize()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(20_000_000)  # the host runs ahead
            start.record()
            function()
            for stream in streams:
                torch.cuda.current_stream().wait_stream(stream)
            end.record()
            torch.cuda.synchronize()
            if turn >= 2:
                times.append(start.elapsed_time(end))
        return statistics.median(times)

    plain, urgent = streams = [torch.cuda.Stream(priority=priority) for priority in (0, -1)]
    with torch.no_grad():
        forward_ms, update_ms = timed(forward), timed(update)
        rate = 26 * numel * len(layers) / update_ms / 1e9
        print(f"forward {forward_ms:.1f} ms, update {update_ms:.1f} ms ({rate:.2f} TB/s), one after the other")
        print(f"beside each other, the engine's kernel: {timed(partial(beside, plain, 0)):.1f} ms", flush=True)
        for count in (8, 16, 24, 32):
            left = multiprocessors - count
            limited_ms, alone_ms = timed(partial(forward, left)), timed(partial(update, count))
            share = min(1.0, alone_ms / forward_ms + 0.05)
            row = [
                timed(partial(beside, stream, count, *limits))
                for stream in (plain, urgent)
                for limits in ((), (left, share))
            ]
            print(
                f"{count} programs: forward with products on {left} {limited_ms:.1f}, update {alone_ms:.1f}, beside each other {row[0]:.1f}, "
                f"products limited {row[1]:.1f}; urgent {row[2]:.1f}, limited {row[3]:.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
