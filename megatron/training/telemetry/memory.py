"""Memory in use, for the log."""

from __future__ import annotations

import resource

import torch

_MIB = 2**20


def memory_in_mib(device: torch.device) -> dict[str, float]:
    """Return MiB by kind: on CUDA allocated and reserved memory, now and at the peak; on CPUs the peak of the process.

    Ranks: each its own; does not make the host wait for the device.
    """
    if device.type != "cuda":
        return {"memory resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
    return {
        "memory allocated": torch.cuda.memory_allocated(device) / _MIB,
        "memory reserved": torch.cuda.memory_reserved(device) / _MIB,
        "max memory allocated": torch.cuda.max_memory_allocated(device) / _MIB,
        "max memory reserved": torch.cuda.max_memory_reserved(device) / _MIB,
    }
