"""Peer memory between the GPUs of an NVLink domain: PyTorch's symmetric memory with its CUDA backend."""

from __future__ import annotations

import os

import torch
import torch.distributed._symmetric_memory as symm_mem
from torch.distributed import ProcessGroup

from megatron.core.distributed.fsdp.comm.nvlink import SHARING, cuda_place, problem_among
from megatron.core.distributed.fsdp.comm.peer.peer_memory import Barrier, PeerMemory, attach, time_out_of


class CudaPeerMemory(PeerMemory):
    """Memory that the driver maps for all devices; barriers are kernels of one warp on the current stream.

    A barrier sets a flag in each peer's signal pad and clears those that the peers set in its own, so a captured one
    can be replayed. One that waits for longer than the process group's time-out traps, which ends all work on the
    device.
    """

    # Below this the launches of copies (50 us of the host) cost more than the SMs that wait for NVLink while they sum.
    direct_nbytes = 64 * 2**20

    def __init__(self, tensor: torch.Tensor, group: ProcessGroup) -> None:
        super().__init__(group, tensor.data_ptr())
        self._handle = symm_mem.rendezvous(tensor, group)
        self._time_out_ms = max(1, int(time_out_of(group, tensor.device).total_seconds() * 1000))

    @classmethod
    def empty(cls, numel: int, dtype: torch.dtype, device: torch.device, group: ProcessGroup) -> torch.Tensor:
        """Allocate peer memory, in whole pages of 2 MiB.

        The driver allocates it, not PyTorch's caching allocator: ``torch.cuda.memory_allocated`` does not count it, and
        it is returned to the device at once.
        """
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        tensor = symm_mem.empty(numel, dtype=dtype, device=device)
        attach(tensor, cls(tensor, group))
        return tensor

    @classmethod
    def problem(cls, group: ProcessGroup, device: torch.device) -> str | None:
        # Barriers set flags by atomics in the peers' memory, which need NVLink, or one device that the ranks share: the driver
        # then runs their kernels in turns, also those that wait for each other.
        may_share = os.environ.get(SHARING) == "1"
        return problem_among(cuda_place(device, backend_problem(device), may_share=may_share), group)

    def barrier(self, which: Barrier) -> None:
        self._handle.barrier(which.channel, self._time_out_ms)

    def _view(self, peer: int, offset_nbytes: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        # The view does not keep the mapping alive; this object keeps both.
        return self._handle.get_buffer(peer, (numel,), dtype, offset_nbytes // dtype.itemsize)


def backend_problem(device: torch.device) -> str | None:
    """Say why PyTorch's symmetric memory cannot be used as it is set up in this process; None if it can."""
    backend = symm_mem.get_backend(device)
    if backend == "CUDA":
        return None
    return (
        f"PyTorch's symmetric memory must have its CUDA backend, got {backend!r}; do not call symm_mem.set_backend, and "
        "leave TORCH_SYMMMEM unset"
    )
