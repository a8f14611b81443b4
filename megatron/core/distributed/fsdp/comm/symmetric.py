"""NCCL symmetric memory: buffers that are registered once with the communicators, for NCCL's symmetric kernels.

NCCL (2.27 and later) uses an ``ncclSymk`` kernel for a collective whose buffers all lie in windows of the communicator.
All ranks register a window together. PyTorch registers the memory of a pool (``register_mem_pool``); memory that the
pool allocates later is registered in a hook of its allocator, with the communicators in an order that differs between
ranks, which hangs with two communicators. So each allocation here has a pool of its own. It is registered when its
memory is there, with one communicator after the other.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.distributed.fsdp.comm.peer_memory import cuda_place, problem_among
from megatron.core.distributed.fsdp.comm.process_group import ProcessGroupTransport
from megatron.core.distributed.fsdp.comm.transport import MemoryKind, scale_and_accumulate, scaled_in_advance
from megatron.core.distributed.fsdp.config.torch_versions import reduce_scatter_flat

# The first version with symmetric kernels.
_NCCL_VERSION = (2, 27)
# The caching allocator takes segments of 20 MiB for buffers between 1 and 10 MiB, half of which a pool of one buffer
# would waste, and segments of the buffer's size for larger ones.
_SMALL_NBYTES, _LARGE_NBYTES = 2**20, 10 * 2**20


def symmetric_memory_problem(group: ProcessGroup, device: torch.device) -> str | None:
    """Return why NCCL's symmetric memory cannot serve buffers on ``device``, the same on all ranks; None if it can.

    Ranks: all of the process group; blocks the host.
    """
    if device.type != "cuda":
        return f"NCCL's symmetric memory is for CUDA devices and the nccl backend, got {device.type} and {dist.get_backend(group)}"
    problem = settings_problem(os.environ)
    if problem is None and torch.cuda.nccl.version() < _NCCL_VERSION:
        problem = f"NCCL must be {'.'.join(map(str, _NCCL_VERSION))} or later, got {torch.cuda.nccl.version()}"
    return problem_among(cuda_place(device, problem), group)


def settings_problem(environment: Mapping[str, str]) -> str | None:
    """Return why an environment variable keeps symmetric memory from working; None if none does."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:true" in environment.get(name, "").replace(" ", "").lower():
            return f"expandable segments cannot be registered, got {name}={environment[name]}; leave expandable_segments out"
    for name in ("NCCL_CUMEM_ENABLE", "NCCL_WIN_ENABLE"):
        if environment.get(name) == "0":
            return f"NCCL cannot register windows with {name}=0; leave it unset"
    name = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"
    if environment.get(name, "0").lower() not in ("", "0", "false", "n", "no"):
        return f"PyTorch registers all memory, and none symmetrically, with {name}={environment[name]}; leave it unset"
    return None


class SymmetricTransport(ProcessGroupTransport):
    """The process group's collectives by NCCL's symmetric kernels, between buffers in windows of its communicators.

    Buffers outside ``empty``'s memory (in the first step, before there is a plan) are copied through staging memory that
    ``reserve`` registered, one buffer for all-gathers and one for reductions. The plan's arenas replace it. Without staging, and
    after ``close``, NCCL's other kernels move them; this must be the same on all ranks. Process groups may be destroyed once no
    buffer is registered with them: after ``close``, or when the model is deleted.

    Ranks: all of the group must construct; blocks until both communicators are there.
    """

    name = "symm"
    is_symmetric = True

    def __init__(self, group: ProcessGroup, gather_group: ProcessGroup, device: torch.device) -> None:
        super().__init__(group, gather_group)
        groups = dict.fromkeys((group, gather_group))
        for each in groups:
            # The first collective makes the communicator, which registration needs.
            dist.all_reduce(torch.zeros(1, device=device), group=each)
        self._backends: list[Any] = [each._get_backend(device) for each in groups]
        self._gone: list[str] = []  # an entry for each buffer that died since the last allocation
        # How to deregister memory in windows, by its address: a call that takes effect once.
        self._windows: dict[int, weakref.finalize[Any, Any]] = {}
        # Registered memory [bytes] through which unregistered buffers are copied, one after the other, and its last uses.
        self._staging: dict[MemoryKind, Tensor] = {}
        self._last_use: dict[MemoryKind, torch.cuda.Event] = {}

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device, kind: MemoryKind) -> Tensor:
        # A plan's buffers replace the staging memory. Free it first, or both would be allocated at the same time.
        self._staging.pop(kind, None)
        return self._registered(numel * dtype.itemsize, device).view(dtype)

    def reserve(self, numel: int, dtype: torch.dtype, device: torch.device, kind: MemoryKind) -> None:
        # Not in the first collective: registration needs all ranks, and ranks may reach collectives of two communicators in
        # different orders.
        nbytes = numel * dtype.itemsize
        if kind not in self._staging or self._staging[kind].numel() < nbytes:
            self._staging.pop(kind, None)  # frees it before there is a larger one
            self._staging[kind] = self._registered(nbytes, device)

    def _registered(self, nbytes: int, device: torch.device) -> Tensor:
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=device)
        if self._gone:
            self._gone.clear()
            torch.cuda.empty_cache()  # only this frees the segment of a pool without buffers
        taken = _LARGE_NBYTES if _SMALL_NBYTES < nbytes < _LARGE_NBYTES else nbytes
        pool = torch.cuda.MemPool(self._backends[0].mem_allocator)
        with torch.cuda.use_mem_pool(pool, device):
            memory = torch.empty(taken, dtype=torch.uint8, device=device)
        # All ranks register with one communicator after the other: in different orders they would wait for each other.
        for backend in self._backends:
            backend.register_mem_pool(pool, symm=True)
        storage, address = memory.untyped_storage(), memory.data_ptr()
        # Both keep the pool: it may only die once it is deregistered and no view of its memory is left.
        weakref.finalize(storage, _release, pool, self._gone)
        self._windows[address] = weakref.finalize(
            storage, _deregister, pool, self._backends, device, self._windows, address
        )
        return memory[:nbytes]

    def close(self) -> None:
        """Deregister all buffers. Collectives go by NCCL's other kernels from then on.

        Ranks: all, before the next collective; blocks the host until this rank's work on the device is done.
        """
        self._staging.clear()
        for deregister in list(self._windows.values()):
            deregister()

    def all_gather(self, full: Tensor, shard: Tensor) -> None:
        # Staging exists only in the first step; later steps only do this lookup.
        if MemoryKind.UNSHARDED in self._staging and self._is_registered(shard):
            self._through_staging(full, MemoryKind.UNSHARDED, partial(super().all_gather, shard=shard))
        else:
            super().all_gather(full, shard)

    def all_reduce(self, out: Tensor, full: Tensor, *, scale: float = 1.0, accumulate: bool = False) -> None:
        move = partial(super().all_reduce, out, scale=scale, accumulate=accumulate)
        self._through_staging(full, MemoryKind.REDUCE_SCATTER_INPUT, move)

    def reduce_scatter(self, out: Tensor, full: Tensor, *, scale: float = 1.0, accumulate: bool = False) -> None:
        move = partial(self._reduce_in_place, out, scale=scale, accumulate=accumulate)
        self._through_staging(full, MemoryKind.REDUCE_SCATTER_INPUT, move)

    def _reduce_in_place(self, out: Tensor, full: Tensor, *, scale: float, accumulate: bool) -> None:
        # Both sides must lie in windows, and ``out``, a main gradient, does not: the sum overwrites this rank's own
        # segment of the input. SUM, then scale: for AVG there is no symmetric kernel.
        total = full.narrow(0, self.rank * out.numel(), out.numel())
        scale = scaled_in_advance(full, scale)
        reduce_scatter_flat(self.group, total, full)
        scale_and_accumulate(out, total, scale=scale, accumulate=accumulate)

    def _through_staging(self, full: Tensor, kind: MemoryKind, move: Callable[[Tensor], None]) -> None:
        """Call ``move`` with ``full``, or with staging memory in its place if ``full`` is not registered and fits."""
        staging = self._staging.get(kind)
        # A captured collective must not use it: a replay would write to memory that was freed when the arenas replaced it.
        if (
            staging is None
            or full.nbytes > staging.numel()
            or self._is_registered(full)
            or torch.cuda.is_current_stream_capturing()
        ):
            move(full)
            return
        stream = torch.cuda.current_stream()
        if kind in self._last_use:
            stream.wait_event(self._last_use[kind])  # another model may have used another stream
        staged = staging[: full.nbytes].view(full.dtype)
        if kind is MemoryKind.REDUCE_SCATTER_INPUT:
            staged.copy_(full.data)
        move(staged)
        if kind is MemoryKind.UNSHARDED:
            full.data.copy_(staged)  # like a collective, this does not change the version counter
        self._last_use[kind] = stream.record_event()

    def _is_registered(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._windows


def _deregister(
    pool: torch.cuda.MemPool, backends: list[Any], device: torch.device, windows: dict[int, Any], address: int
) -> None:
    """Take memory out of the windows. Each rank does it alone: peers have mappings of their own."""
    del windows[address]
    # No kernel may read or write through a window while it goes. Where the device is lost or the process group was
    # destroyed first, the windows are gone already, and an error would be raised in unrelated code.
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize(device)
    for backend in backends:
        with contextlib.suppress(RuntimeError):
            backend.deregister_mem_pool(pool)


def _release(pool: torch.cuda.MemPool, gone: list[str]) -> None:
    """Note that memory was freed; its pool dies with this call. The allocator caches the segment until ``empty_cache``."""
    gone.append("buffer")
