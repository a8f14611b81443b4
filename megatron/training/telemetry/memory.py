"""Memory in use, for the log."""

from __future__ import annotations

import resource

import torch

from megatron.core.distributed.fsdp import peer_memory_nbytes

_MIB = 2**20


def memory_in_mib(device: torch.device) -> dict[str, float]:
    """Return MiB by kind: on CUDA allocated and reserved memory, now and at the peak; on CPUs the peak of the process.

    CUDA's figures are those of PyTorch's allocator and what the engine holds now past it, for other ranks to read.
    Ranks: each its own; does not make the host wait for the device.
    """
    if device.type != "cuda":
        return {"memory resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
    shared = peer_memory_nbytes(device)
    counts = {
        "memory allocated": torch.cuda.memory_allocated,
        "memory reserved": torch.cuda.memory_reserved,
        "max memory allocated": torch.cuda.max_memory_allocated,
        "max memory reserved": torch.cuda.max_memory_reserved,
    }
    return {name: (count(device) + shared) / _MIB for name, count in counts.items()}
