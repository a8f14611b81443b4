"""The life of symmetric buffers, with NCCL's part played by a stand-in: the same on all ranks, and nothing is left over."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp.collectives import MemoryKind
from megatron.core.distributed.fsdp.collectives import symmetric as module
from megatron.core.distributed.fsdp.collectives.symmetric import SymmetricTransport
from tests.support.launch import run_ranks

CPU = torch.device("cpu")
MIB = 2**20


class Pool:
    """A memory pool of a certain allocator."""

    def __init__(self, allocator: str) -> None:
        self.allocator = allocator


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
    keep = torch.cuda.MemPool, torch.cuda.use_mem_pool, torch.cuda.synchronize, dist.ProcessGroup._get_backend
    backends = {group: Backend("reductions", log), gathers: Backend("gathers", log)}
    torch.cuda.MemPool = Pool  # type: ignore[misc,assignment]
    torch.cuda.use_mem_pool = lambda pool, device: contextlib.nullcontext()  # type: ignore[assignment]
    torch.cuda.synchronize = lambda device: log.append(("synchronise", ""))  # type: ignore[assignment]
    dist.ProcessGroup._get_backend = lambda self, device: backends[self]  # type: ignore[method-assign]
    try:
        transport.__init__(group, gathers, CPU)  # type: ignore[misc]
        yield transport, list(backends.values()), log
    finally:
        torch.cuda.MemPool, torch.cuda.use_mem_pool, torch.cuda.synchronize, dist.ProcessGroup._get_backend = keep  # type: ignore[misc,method-assign]


def _registered_while_used() -> None:
    with _stand_in() as (transport, backends, log):
        big = transport.empty(8 * MIB, torch.bfloat16, CPU, MemoryKind.GATHERED)
        assert big.dtype == torch.bfloat16 and big.numel() == 8 * MIB
        assert log == [("register", "reductions"), ("register", "gathers")], "one communicator after the other"
        view = big[5:7].view(torch.uint8).data
        del big
        assert [len(backend.pools) for backend in backends] == [1, 1], "a view keeps it"
        log.clear()
        del view
        assert log == [("synchronise", ""), ("deregister", "reductions"), ("deregister", "gathers")]
        assert len(transport._emptied) == 1
        again = transport.empty(8 * MIB, torch.bfloat16, CPU, MemoryKind.STAGING)
        assert not transport._emptied and len(transport._registered) == 1 and again.numel()


def _small_buffers_share() -> None:
    with _stand_in() as (transport, backends, _):
        small = [transport.empty(numel, torch.float32, CPU, MemoryKind.SHARD) for numel in (3, 1000, MIB)]
        assert len(backends[0].pools) == 1 and len({t.untyped_storage().data_ptr() for t in small}) == 1
        offsets = [t.storage_offset() * t.element_size() for t in small]
        assert offsets == [0, 512, 512 + 4096], "the same on all ranks, and aligned"
        for index, tensor in enumerate(small):
            tensor.fill_(index)
        assert all((tensor == index).all() for index, tensor in enumerate(small)), "they do not overlap"
        fills = [transport.empty(2 * MIB - 2000, torch.float32, CPU, MemoryKind.SHARD) for _ in range(2)]
        assert len(backends[0].pools) == 2, "the second of them did not fit"
        del small, tensor
        assert len(backends[0].pools) == 2 and transport.empty(0, torch.int8, CPU, MemoryKind.SHARD).numel() == 0
        del fills
        assert not backends[0].pools and not backends[1].pools
        fresh = transport.empty(1, torch.int64, CPU, MemoryKind.SHARD)
        assert len(backends[0].pools) == 1 and fresh.storage_offset() == 0, "an old slab is not revived"


def _closed() -> None:
    with _stand_in() as (transport, backends, log):
        buffers = [transport.empty(numel, torch.float32, CPU, MemoryKind.SHARD) for numel in (5, 4 * MIB)]
        transport.close()
        assert not backends[0].pools and not backends[1].pools
        log.clear()
        buffers[0].fill_(1)
        buffers.clear()
        transport.close()
        assert not log, "nothing is deregistered twice"
        assert transport.empty(5, torch.float32, CPU, MemoryKind.SHARD).numel() == 5 and log, "it can be used again"


def _destroyed_first() -> None:
    """A finaliser that raised would print a traceback at a place that has nothing to do with it."""
    with _stand_in() as (transport, backends, _):
        buffer = transport.empty(4 * MIB, torch.float32, CPU, MemoryKind.SHARD)
        backends[0].is_destroyed = True
        gone = weakref.ref(transport)
        del transport
        assert gone() is not None  # the stand-in's frame holds it
        del buffer
        assert not backends[1].pools, "what can be deregistered is, whatever happened to the other"


def _sums_in_place() -> None:
    """Both sides of a reduction lie in windows: the sum takes the place of the rank's own segment."""
    rank, used = dist.get_rank(), []
    keep = module.reduce_scatter_flat

    def reduce_scatter(group: Any, shard: torch.Tensor, full: torch.Tensor) -> None:
        used.append(shard.data_ptr() - full.data_ptr())
        keep(group, shard, full)

    module.reduce_scatter_flat = reduce_scatter
    try:
        with _stand_in() as (transport, _, _):
            for out in (torch.ones(3), torch.ones(3, dtype=torch.float64)):
                full = torch.arange(6.0) * (rank + 1)
                transport.reduce_scatter(out, full, scale=0.5, accumulate=out.dtype == torch.float64)
                expected = 1.5 * torch.arange(6.0)[3 * rank : 3 * rank + 3] + (out.dtype == torch.float64)
                assert out.tolist() == expected.tolist()
    finally:
        module.reduce_scatter_flat = keep
    assert used == [12 * rank] * 2


@pytest.mark.parametrize(
    "check", [_registered_while_used, _small_buffers_share, _closed, _destroyed_first, _sums_in_place]
)
def test_on_two_ranks(check: Callable[[], None]) -> None:
    run_ranks(2, check)
