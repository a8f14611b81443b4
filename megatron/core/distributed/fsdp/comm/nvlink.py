"""Whether NCCL's symmetric memory can work between the ranks of a group, and why not."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

# The first version with symmetric kernels.
_NCCL_VERSION = (2, 27)
# CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED of the driver's API: true over NVLink, false over PCIe.
_NATIVE_ATOMICS = 3


@dataclass(frozen=True)
class Place:
    """Where a rank is: its host, its device there, which other devices NVLink connects that one to, and what is wrong."""

    host: str
    device: int
    linked: tuple[int, ...]
    problem: str | None = None


def symmetric_memory_problem(group: ProcessGroup, device: torch.device) -> str | None:
    """Why NCCL's symmetric memory cannot serve the group's buffers on ``device``, the same on all ranks; None if it can.

    Ranks: all of the group; blocks the host.
    """
    if device.type != "cuda":
        return f"NCCL's symmetric memory is for CUDA devices and the nccl backend, got {device.type} and {dist.get_backend(group)}"
    places: list[Place] = [None] * group.size()  # type: ignore[list-item]
    dist.all_gather_object(places, _place_of(device), group=group)
    return problem_between(places)


def problem_between(places: Sequence[Place]) -> str | None:
    """Why ranks at these places cannot share symmetric memory; None if they can."""
    for place in places:
        if place.problem is not None:
            return place.problem
    hosts = sorted({place.host for place in places})
    if len(hosts) > 1:
        return f"all ranks must be on one host, in one NVLink domain, got {len(hosts)} hosts: {', '.join(hosts)}"
    devices = [place.device for place in places]
    if len(set(devices)) < len(devices):
        return f"each rank must have a device of its own and see the others', got devices {devices}"
    for place in places:
        for other in devices:
            if other != place.device and other not in place.linked:
                return f"NVLink must connect all ranks' devices, got none between devices {place.device} and {other}"
    return None


def settings_problem(environment: Mapping[str, str]) -> str | None:
    """Which environment variable keeps symmetric memory from working; None where none does."""
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


def _place_of(device: torch.device) -> Place:
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = f"{platform.node()} {boot.read_text()[:8] if boot.exists() else ''}".strip()
    index = torch.cuda.current_device() if device.index is None else device.index
    problem = settings_problem(os.environ)
    if problem is None and torch.cuda.nccl.version() < _NCCL_VERSION:
        problem = f"NCCL must be {'.'.join(map(str, _NCCL_VERSION))} or later, got {torch.cuda.nccl.version()}"
    return Place(host, index, linked_devices(index), problem)


def linked_devices(index: int) -> tuple[int, ...]:
    """The visible devices, besides ``index``, that it reaches over NVLink."""
    links = _nvlinks(index)
    return tuple(
        other
        for other in range(torch.cuda.device_count())
        if other != index
        and torch.cuda.can_device_access_peer(index, other)
        and (links[other] > 0 or _has_native_atomics(index, other))
    )


def _nvlinks(index: int) -> list[int]:
    """Links to each visible device, as far as the driver's management library tells (not in every container)."""
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _detect_dma_connectivity  # type: ignore[attr-defined]

    try:
        row: list[int] = _detect_dma_connectivity(DeviceType.CUDA, "nvlink").matrix[index]
    except RuntimeError:
        return [0] * torch.cuda.device_count()
    return row


def _has_native_atomics(index: int, other: int) -> bool:
    """Whether the driver says that one device's atomics work in the other's memory, as they do over NVLink alone."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    handles = [ctypes.c_int(), ctypes.c_int()]
    for handle, ordinal in zip(handles, (index, other), strict=True):
        if driver.cuDeviceGet(ctypes.byref(handle), ordinal) != 0:
            return False
    value = ctypes.c_int()
    status: int = driver.cuDeviceGetP2PAttribute(ctypes.byref(value), _NATIVE_ATOMICS, *handles)
    return status == 0 and value.value == 1
