"""Memory in use, for the log."""

from __future__ import annotations

import resource
from collections.abc import Mapping

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


def memory_scalars(device: torch.device) -> dict[str, float]:
    """Return bytes and blocks by their names in Megatron-LM's TensorBoard logs; on CPUs nothing."""
    if device.type != "cuda":
        return {}
    stats, shared = torch.cuda.memory_stats(device), peer_memory_nbytes(device)
    return {
        "mem-reserved-bytes": stats["reserved_bytes.all.current"] + shared,
        "mem-allocated-bytes": stats["allocated_bytes.all.current"] + shared,
        "mem-max-allocated-bytes": stats["allocated_bytes.all.peak"] + shared,
        "mem-allocated-count": stats["allocation.all.current"],
    }


def memory_line(iteration: int, mebibytes: Mapping[str, float]) -> str:
    """Format Megatron-LM's line about memory from what ``memory_in_mib`` returned on CUDA."""
    names = {
        "allocated": "memory allocated",
        "max allocated": "max memory allocated",
        "reserved": "memory reserved",
        "max reserved": "max memory reserved",
    }
    parts = (f"{name}: {mebibytes[kind]:.2f}" for name, kind in names.items())
    return " | ".join((f"[Rank 0] (after {iteration} iterations) memory (MB)", *parts))
