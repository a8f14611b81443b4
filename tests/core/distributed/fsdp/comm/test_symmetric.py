"""Symmetric buffers are registered and deregistered alike on all ranks. A stand-in plays NCCL's part."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp.comm import symmetric as module
from megatron.core.distributed.fsdp.comm.symmetric import SymmetricTransport
from megatron.core.distributed.fsdp.comm.transport import MemoryKind
from megatron.core.distributed.fsdp.config.torch_versions import reduce_scatter_flat
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
        assert len(transport._registrations) == Pool.num_alive == 2 and again.numel() == more.numel()


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


@pytest.mark.parametrize("check", [_registered_while_used, _sizes, _closed, _destroyed_first, _sums_in_place])
def test_on_two_ranks(check: Callable[[], None]) -> None:
    run_ranks(2, check)
