"""NCCL symmetric memory: buffers from NCCL's own pool, registered once, which its symmetric kernels read and write.

NCCL (2.27 and later) takes an ``ncclSymk`` kernel for a collective whose buffers all lie in windows of the communicator.
A window is registered by all ranks together. PyTorch registers what a memory pool holds (``register_mem_pool``), and
what the pool grows by afterwards in a hook of its allocator, which walks the communicators in an order that is not the
same on all ranks: with two communicators they would wait for each other. So each allocation here has a pool of its own,
which is registered when it is full, with one communicator after the other.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core.distributed.fsdp.collectives.process_group import ProcessGroupTransport
from megatron.core.distributed.fsdp.collectives.transport import MemoryKind, settle
from megatron.core.distributed.fsdp.torch_versions import reduce_scatter_flat

# Small buffers share an allocation: each would take a segment of the caching allocator (2 or 20 MiB) and two windows.
_SLAB_NBYTES = 16 * 2**20
# Offsets in a slab: what the caching allocator rounds to, and more than the kernels' vector loads need.
_ALIGNMENT = 512


class SymmetricTransport(ProcessGroupTransport):
    """The group's collectives between buffers in windows of its communicators, by NCCL's symmetric kernels.

    What does not lie in ``empty``'s memory (a first step before there is a plan) goes by NCCL's other kernels, as it
    must then on all ranks. Groups may be destroyed once no buffer is registered with them: after ``close``, or when the
    model is gone.

    Ranks: all of the group must construct; blocks until both communicators are there.
    """

    name = "symm"
    is_symmetric = True

    def __init__(self, group: ProcessGroup, gather_group: ProcessGroup, device: torch.device) -> None:
        super().__init__(group, gather_group)
        groups = dict.fromkeys((group, gather_group))
        for each in groups:
            # A communicator is made by its first collective, and can register nothing before.
            dist.all_reduce(torch.zeros(1, device=device), group=each)
        self._backends: list[Any] = [each._get_backend(device) for each in groups]
        self._registered: list[weakref.finalize[..., Any]] = []
        self._emptied: list[torch.cuda.MemPool] = []  # pools whose last buffer is gone
        self._slab: weakref.ref[torch.UntypedStorage] | None = None
        self._slab_used_nbytes = 0

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device, kind: MemoryKind) -> torch.Tensor:
        nbytes = numel * dtype.itemsize
        if nbytes == 0:
            return torch.empty(numel, dtype=dtype, device=device)
        if nbytes > _SLAB_NBYTES // 2:
            return self._allocate(nbytes, device).view(dtype)
        slab = None if self._slab is None else self._slab()
        if slab is None or self._slab_used_nbytes + nbytes > _SLAB_NBYTES:
            slab = self._allocate(_SLAB_NBYTES, device).untyped_storage()
            self._slab, self._slab_used_nbytes = weakref.ref(slab), 0
        piece = torch.empty(0, dtype=torch.uint8, device=device)
        piece.set_(slab, self._slab_used_nbytes, (nbytes,))  # type: ignore[call-overload]
        self._slab_used_nbytes += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return piece.view(dtype)

    def _allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Registered memory [nbytes] that is given back when its last view is gone."""
        self._emptied.clear()  # gives back segments, which their last buffer could not do while it was dying
        self._registered = [each for each in self._registered if each.alive]
        pool = torch.cuda.MemPool(self._backends[0].mem_allocator)
        with torch.cuda.use_mem_pool(pool, device):
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        for backend in self._backends:
            backend.register_mem_pool(pool, symm=True)
        storage = memory.untyped_storage()
        self._registered.append(weakref.finalize(storage, _deregister, pool, self._backends, self._emptied, device))
        return memory

    def close(self) -> None:
        """Afterwards no buffer is registered, and the groups can be destroyed; collectives go by NCCL's other kernels.

        Ranks: all of the group, before the next collective; blocks the host until this rank's work is done.
        """
        for registration in self._registered:
            registration()
        self._registered.clear()
        self._slab = None

    def reduce_scatter(
        self, out: torch.Tensor, full: torch.Tensor, *, scale: float = 1.0, accumulate: bool = False
    ) -> None:
        # Both sides must lie in windows, which ``out``, a main gradient, does not: the sum takes the place of this rank's
        # own segment. SUM, then scale: for AVG there is no symmetric kernel.
        total = full.narrow(0, self.rank * out.numel(), out.numel())
        reduce_scatter_flat(self.group, total, full)
        settle(out, total, scale=scale, accumulate=accumulate)


def _deregister(
    pool: torch.cuda.MemPool, backends: list[Any], emptied: list[torch.cuda.MemPool], device: torch.device
) -> None:
    """Afterwards the pool's memory is in no window. Each rank does it alone: peers map the memory themselves."""
    # Nothing may read or write through a window that goes away. Where the device is lost or a group was destroyed
    # first, its windows are gone with it.
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize(device)
    for backend in backends:
        with contextlib.suppress(RuntimeError):
            backend.deregister_mem_pool(pool)
    emptied.append(pool)
