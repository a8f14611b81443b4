"""Time peer copy and NCCL: milliseconds, bandwidth, and what a call costs the host.

    torchrun --nproc-per-node 2 benchmarks/peer_copy_probe.py

Bandwidth is bytes of the whole buffer over time ("algorithm bandwidth"). Times are of the slowest rank.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.core.distributed.fsdp.comm.peer_copy import PeerCopyTransport, peer_copy_problem
from megatron.core.distributed.fsdp.comm.process_group import ProcessGroupTransport
from megatron.core.distributed.fsdp.comm.transport import MemoryKind, Transport

SIZES_MIB = (1, 8, 128, 436)
NUM_CALLS = 20


def main() -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    group = dist.group.WORLD
    assert group is not None
    problem = peer_copy_problem(group, device)
    if problem is not None:
        raise SystemExit(problem)
    _say(f"{torch.cuda.get_device_name()} x {group.size()}, torch {torch.__version__}")
    for mib in SIZES_MIB:
        _probe(mib, group, device)
    dist.destroy_process_group()


def _probe(mib: int, group: dist.ProcessGroup, device: torch.device) -> None:
    numel = mib * 2**20 // 2 // group.size() // 1024 * 1024  # of bf16, in one shard
    begin = time.perf_counter()
    pulls = PeerCopyTransport(group, group, device)
    pulls.direct_nbytes = 0
    shard = pulls.empty(numel, torch.bfloat16, device, MemoryKind.SHARD)
    _say(f"\n{mib} MiB of bf16; empty and rendezvous {1e3 * (time.perf_counter() - begin):.1f} ms")
    staging = pulls.empty(numel * group.size(), torch.bfloat16, device, MemoryKind.REDUCE_SCATTER_INPUT)
    full = pulls.empty(numel * group.size(), torch.bfloat16, device, MemoryKind.UNSHARDED)
    out = torch.zeros(numel, device=device)
    # Not zeros: moving them takes less power, and so less time.
    for tensor in (shard, staging):
        tensor.normal_()
    direct = PeerCopyTransport(group, group, device)
    direct.direct_nbytes = 2**62
    nccl = ProcessGroupTransport(group, group)
    pulls.publish()
    nbytes = full.numel() * full.element_size()
    cases: list[tuple[str, Callable[[], None]]] = [
        ("all-gather, NCCL", lambda: nccl.all_gather(full, shard)),
        ("all-gather, peer copy", lambda: pulls.all_gather(full, shard)),
        ("reduce-scatter, NCCL", _reduction(nccl, out, staging)),
        ("reduce-scatter, pulls", _reduction(pulls, out, staging)),
        ("reduce-scatter, direct", _reduction(direct, out, staging)),
        ("publish", pulls.publish),
    ]
    for name, call in cases:
        milliseconds, host_us = _time(call, device)
        bandwidth = "" if name == "publish" else f"{nbytes / milliseconds / 1e6:8.0f} GB/s"
        _say(f"  {name:24} {milliseconds:8.3f} ms {host_us:7.1f} us host {bandwidth}")
    pulls.end_pass()
    torch.cuda.synchronize()
    dist.barrier()


def _reduction(transport: Transport, out: torch.Tensor, staging: torch.Tensor) -> Callable[[], None]:
    return lambda: transport.reduce_scatter(out, staging, scale=0.25, accumulate=True)


def _time(call: Callable[[], None], device: torch.device) -> tuple[float, float]:
    """Time a call: milliseconds on the device and microseconds on the host, the slowest rank's median of 5 runs."""
    device_ms, host_us = [], []
    for _ in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        start.record()
        begin = time.perf_counter()
        for _ in range(NUM_CALLS):
            call()
        host_us.append(1e6 * (time.perf_counter() - begin) / NUM_CALLS)
        end.record()
        torch.cuda.synchronize()
        device_ms.append(start.elapsed_time(end) / NUM_CALLS)
    # The first run compiles, and makes communicators and views.
    slowest = torch.tensor([statistics.median(device_ms[1:]), statistics.median(host_us[1:])], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    milliseconds, microseconds = slowest.tolist()
    return milliseconds, microseconds


def _say(words: str) -> None:
    if dist.get_rank() == 0:
        print(words, flush=True)


if __name__ == "__main__":
    main()
