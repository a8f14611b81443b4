"""Symmetric buffers are registered and deregistered alike on all ranks. A stand-in plays NCCL's part."""

from __future__ import annotations

import contextlib
import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.distributed.fsdp import fully_shard, fully_shard_optimizer
from megatron.core.distributed.fsdp.comm import process_group
from megatron.core.distributed.fsdp.comm import symmetric as module
from megatron.core.distributed.fsdp.comm.choose import TRANSPORTS, TransportRow
from megatron.core.distributed.fsdp.comm.symmetric import SymmetricTransport
from megatron.core.distributed.fsdp.comm.transport import MemoryKind
from megatron.core.distributed.fsdp.config.placement import strategy_placements
from megatron.core.distributed.fsdp.config.torch_versions import all_gather_flat, reduce_scatter_flat
from tests.support.launch import run_ranks

CPU = torch.device("cpu")
MIB = 2**20


class Pool:
    """A memory pool of a certain allocator."""

    num_alive = 0

    def __init__(self, allocator: str) -> None:
        self.allocator = allocator
        Pool.num_alive += 1

    def __del__(self) -> None:
        Pool.num_alive -= 1


class Backend:
    """Remembers which pools are registered with a communicator, and refuses what NCCL's backend would."""

    mem_allocator = "ncclMemAlloc"

    def __init__(self, name: str, log: list[tuple[str, str]]) -> None:
        self.name, self.log = name, log
        self.pools: list[Pool] = []
        self.is_destroyed = False

    def register_mem_pool(self, pool: Pool, symm: bool = False) -> None:
        assert symm and pool.allocator == "ncclMemAlloc" and pool not in self.pools
        self.pools.append(pool)
        self.log.append(("register", self.name))

    def deregister_mem_pool(self, pool: Pool) -> None:
        if self.is_destroyed or pool not in self.pools:
            raise RuntimeError("the communicator is gone, or never knew the pool")
        self.pools.remove(pool)
        self.log.append(("deregister", self.name))


@contextlib.contextmanager
def _stand_in() -> Iterator[tuple[SymmetricTransport, list[Backend], list[tuple[str, str]]]]:
    """A transport over two groups whose backends and pools are the stand-ins."""
    log: list[tuple[str, str]] = []
    group, gathers = dist.group.WORLD, dist.new_group()
    transport = SymmetricTransport.__new__(SymmetricTransport)
    keep = torch.cuda.MemPool, torch.cuda.use_mem_pool, torch.cuda.synchronize, torch.cuda.empty_cache
    keep_backend = dist.ProcessGroup._get_backend
    backends = {group: Backend("reductions", log), gathers: Backend("gathers", log)}
    torch.cuda.MemPool = Pool  # type: ignore[misc,assignment]
    torch.cuda.use_mem_pool = lambda pool, device: contextlib.nullcontext()  # type: ignore[assignment,misc]
    torch.cuda.synchronize = lambda device: log.append(("synchronise", ""))  # type: ignore[assignment,misc]
    torch.cuda.empty_cache = lambda: log.append(("empty the cache", ""))
    dist.ProcessGroup._get_backend = lambda self, device: backends[self]  # type: ignore[method-assign,assignment,return-value]
    try:
        transport.__init__(group, gathers, CPU)  # type: ignore[misc]
        yield transport, list(backends.values()), log
    finally:
        dist.ProcessGroup._get_backend = keep_backend  # type: ignore[method-assign]
        torch.cuda.MemPool, torch.cuda.use_mem_pool, torch.cuda.synchronize, torch.cuda.empty_cache = keep  # type: ignore[misc]


def _registered_while_used() -> None:
    with _stand_in() as (transport, backends, log):
        big = transport.empty(8 * MIB, torch.bfloat16, CPU, MemoryKind.UNSHARDED)
        assert big.dtype == torch.bfloat16 and big.numel() == 8 * MIB
        assert log == [("register", "reductions"), ("register", "gathers")], "one communicator after the other"
        view = big[5:7].view(torch.uint8).data
        del big
        assert [len(backend.pools) for backend in backends] == [1, 1], "a view keeps it"
        log.clear()
        del view
        assert log == [("synchronise", ""), ("deregister", "reductions"), ("deregister", "gathers")]
        assert Pool.num_alive == 0, "its segment can be freed"
        log.clear()
        again = transport.empty(8 * MIB, torch.bfloat16, CPU, MemoryKind.REDUCE_SCATTER_INPUT)
        assert log == [("empty the cache", ""), ("register", "reductions"), ("register", "gathers")]
        log.clear()
        more = transport.empty(8 * MIB, torch.bfloat16, CPU, MemoryKind.REDUCE_SCATTER_INPUT)
        assert log == [("register", "reductions"), ("register", "gathers")], "nothing was freed meanwhile"
        assert len(transport._windows) == Pool.num_alive == 2 and again.numel() == more.numel()


def _sizes() -> None:
    """Segments of the caching allocator are of 2 MiB up to 1 MiB, and of 20 MiB up to 10 MiB."""
    with _stand_in() as (transport, _, _):
        for numel, nbytes in ((3, 12), (MIB // 4, MIB), (MIB // 4 + 1, 10 * MIB), (3 * MIB, 12 * MIB)):
            tensor = transport.empty(numel, torch.float32, CPU, MemoryKind.SHARD)
            assert tensor.numel() == numel and tensor.untyped_storage().nbytes() == nbytes
        assert transport.empty(0, torch.int8, CPU, MemoryKind.SHARD).numel() == 0


def _closed() -> None:
    with _stand_in() as (transport, backends, log):
        buffers = [transport.empty(numel, torch.float32, CPU, MemoryKind.SHARD) for numel in (5, 4 * MIB)]
        transport.close()
        assert not backends[0].pools and not backends[1].pools
        log.clear()
        assert Pool.num_alive == 2, "buffers keep their pools while they are used"
        buffers[0].fill_(1)
        buffers.clear()
        transport.close()
        assert not log and Pool.num_alive == 0, "nothing is deregistered twice"
        assert transport.empty(5, torch.float32, CPU, MemoryKind.SHARD).numel() == 5 and log, "it can be used again"


def _destroyed_first() -> None:
    """A finaliser that raised would print a traceback at a place that has nothing to do with it."""
    with _stand_in() as (transport, backends, _):
        buffer = transport.empty(4 * MIB, torch.float32, CPU, MemoryKind.SHARD)
        backends[0].is_destroyed = True
        del buffer
        assert not backends[1].pools, "what can be deregistered is, whatever happened to the other"


def _sums_in_place() -> None:
    """Both sides of a reduction lie in windows: the sum takes the place of the rank's own segment."""
    rank, used = dist.get_rank(), []

    def reduce_scatter(group: Any, shard: torch.Tensor, full: torch.Tensor) -> None:
        used.append(shard.data_ptr() - full.data_ptr())
        reduce_scatter_flat(group, shard, full)

    with patch.object(module, "reduce_scatter_flat", reduce_scatter), _stand_in() as (transport, _, _):
        for out in (torch.ones(3), torch.ones(3, dtype=torch.float64)):
            full = torch.arange(6.0) * (rank + 1)
            transport.reduce_scatter(out, full, scale=0.5, accumulate=out.dtype == torch.float64)
            expected = 1.5 * torch.arange(6.0)[3 * rank : 3 * rank + 3] + (out.dtype == torch.float64)
            assert out.tolist() == expected.tolist()
    assert used == [12 * rank] * 2


class _Stream:
    """The device's only stream."""

    def wait_event(self, event: str) -> None:
        assert event == "used"

    def record_event(self) -> str:
        return "used"


@contextlib.contextmanager
def _watched(transport: SymmetricTransport) -> Iterator[list[tuple[str, bool]]]:
    """Record (collective, whether NCCL would run a symmetric kernel: all buffers are registered)."""
    ran: list[tuple[str, bool]] = []

    def watch(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def watching(group: Any, *buffers: torch.Tensor) -> Any:
            ran.append((name, all(buffer.untyped_storage().data_ptr() in transport._windows for buffer in buffers)))
            return collective(group, *buffers)

        return watching

    with contextlib.ExitStack() as patches:
        patches.enter_context(patch.object(torch.cuda, "current_stream", _Stream))
        patches.enter_context(patch.object(torch.cuda, "is_current_stream_capturing", lambda: False))
        patches.enter_context(patch.object(module, "reduce_scatter_flat", watch("reduce-scatter", reduce_scatter_flat)))
        patches.enter_context(patch.object(process_group, "all_gather_flat", watch("gather", all_gather_flat)))
        yield ran


def _soon(holds: Callable[[], bool]) -> bool:
    """Return whether the condition holds within a second: gloo's threads keep a collective's tensors for a moment."""
    end = time.monotonic() + 1
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()


def _staged_until_there_is_memory() -> None:
    rank, kinds = dist.get_rank(), (MemoryKind.UNSHARDED, MemoryKind.REDUCE_SCATTER_INPUT)
    with _stand_in() as (transport, _, log), _watched(transport) as ran:
        for kind in kinds:
            transport.reserve(4, torch.bfloat16, CPU, kind)
            transport.reserve(6, torch.float32, CPU, kind)
            transport.reserve(5, torch.float32, CPU, kind)
        assert len(transport._windows) == 2, "the largest of each kind"
        shard = transport.empty(3, torch.float32, CPU, MemoryKind.SHARD).fill_(rank)
        full, grads, out = torch.empty(6), torch.arange(6.0), torch.empty(3)
        version = full._version
        transport.all_gather(full, shard)
        transport.reduce_scatter(out, grads, scale=0.5)
        assert ran == [("gather", True), ("reduce-scatter", True)] and full._version == version
        assert full.tolist() == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0] and out.tolist() == [3.0 * rank + i for i in range(3)]
        total = torch.ones(6)
        transport.all_reduce(total, total)
        assert total.tolist() == [2.0] * 6
        ran.clear()
        transport.all_gather(torch.empty(8), shard.new_ones(4))
        transport.all_gather(torch.empty(6), torch.ones(3))
        transport.reduce_scatter(torch.empty(4), torch.ones(8))
        assert not any(registered for _, registered in ran), (
            "buffers that are too large, or already half registered, are not staged"
        )
        ran.clear()
        arenas = [transport.empty(6, torch.float32, CPU, kind) for kind in kinds]
        assert not transport._staging and _soon(lambda: len(transport._windows) == 3), "arenas replace staging"
        transport.all_gather(arenas[0], shard)
        transport.reduce_scatter(out, arenas[1].fill_(1.0))
        assert ran == [("gather", True), ("reduce-scatter", True)]
        transport.reserve(6, torch.float32, CPU, MemoryKind.UNSHARDED)
        transport.close()
        assert not transport._windows and not transport._staging
        counts = Counter(what for what, _ in log)
        assert counts["register"] == counts["deregister"] == 16, "eight buffers with two communicators"


def _registered_from_the_first_step_on() -> None:
    """The engine's collectives of weights and gradients, with units of several sizes, before and after there is a plan."""
    for strategy, gathers in (("optim_grads_params", True), ("optim_grads", False)):
        with _stand_in() as (transport, _, _), _watched(transport) as ran:
            row = TransportRow("stand-in", lambda *_: transport, lambda *_: None)
            with patch.dict(TRANSPORTS, {"symm": row}):
                net = torch.nn.Sequential(*(torch.nn.Linear(width, width) for width in (16, 16, 16)))
                mesh = init_device_mesh("cpu", (2,))  # which keeps its transport
                for unit in (*net, net):
                    fully_shard(unit, mesh, strategy_placements(strategy), use_symm_mem=True)
            optimizer = fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
            for step in range(3):
                ran.clear()
                net(torch.ones(2, 16)).sum().backward()
                assert ran and all(registered for name, registered in ran if gathers or name != "gather"), (step, ran)
                assert {name for name, _ in ran} >= {"reduce-scatter", *(["gather"] if gathers else [])}
                optimizer.step()
                optimizer.zero_grad()
            assert not transport._staging
            del net, optimizer
            gc.collect()


@pytest.mark.parametrize(
    "check",
    [
        _registered_while_used,
        _sizes,
        _closed,
        _destroyed_first,
        _sums_in_place,
        _staged_until_there_is_memory,
        _registered_from_the_first_step_on,
    ],
)
def test_on_two_ranks(check: Callable[[], None]) -> None:
    run_ranks(2, check)
