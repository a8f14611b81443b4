"""Where the ranks of a process group run, and whether NVLink connects all of their devices."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

# CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED of the driver's API: true over NVLink, false over PCIe.
_NATIVE_ATOMICS = 3
# PyTorch's switch for symmetric memory between ranks that share a device. It is off by default: such ranks are nearly always
# a launcher's mistake.
SHARING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


@dataclass(frozen=True)
class Place:
    """The place of a rank: its host, its device there, the devices that NVLink connects to it, and a problem.

    ``shared_as`` is the UUID of the device where other ranks may use the same one, and empty where they may not.
    """

    host: str
    device: int
    linked: tuple[int, ...]
    problem: str | None = None
    shared_as: str = ""


def problem_among(own: Place, group: ProcessGroup) -> str | None:
    """Say why the ranks of a process group cannot reach each other's memory, the same on all ranks; None if they can.

    Args:
        own: the place of this rank.

    Ranks: all of the process group; blocks the host.
    """
    places: list[Place] = [own] * group.size()
    dist.all_gather_object(places, own, group=group)
    return problem_between(places)


def problem_between(places: Sequence[Place]) -> str | None:
    """Say why ranks at these places cannot reach each other's memory; None if they can."""
    for place in places:
        if place.problem is not None:
            return place.problem
    hosts = sorted({place.host for place in places})
    if len(hosts) > 1:
        return f"all ranks must be on one host, in one NVLink domain, got {len(hosts)} hosts: {', '.join(hosts)}"
    devices = [place.device for place in places]
    # Ranks with equal indices share a device, or each sees only its own: the UUIDs tell these cases apart.
    names = {(place.device, place.shared_as or rank) for rank, place in enumerate(places)}
    if len(names) > len(set(devices)):
        return (
            f"each rank must have a device of its own and see the others', got devices {devices}; ranks may share one for "
            f"peer copy only, with {SHARING}=1"
        )
    for place in places:
        for other in devices:
            if other != place.device and other not in place.linked:
                return f"NVLink must connect all ranks' devices, got none between devices {place.device} and {other}"
    return None


def cuda_place(device: torch.device, problem: str | None, *, may_share: bool = False) -> Place:
    """Return this rank's place, with the problem that it reports to the others; ``may_share``: its device, with other ranks."""
    index = torch.cuda.current_device() if device.index is None else device.index
    shared_as = str(torch.cuda.get_device_properties(index).uuid) if may_share else ""
    return Place(this_host(), index, linked_devices(index), problem, shared_as)


def this_host() -> str:
    """Return a name of this host that no other host or container of another host has."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()} {boot.read_text()[:8] if boot.exists() else ''}".strip()


def linked_devices(index: int) -> tuple[int, ...]:
    """Return the visible devices, besides ``index``, that it reaches over NVLink."""
    links = _nvlinks(index)
    return tuple(
        other
        for other in range(torch.cuda.device_count())
        if other != index
        and torch.cuda.can_device_access_peer(index, other)
        and (links[other] > 0 or _has_native_atomics(index, other))
    )


def _nvlinks(index: int) -> list[int]:
    """Count the links to each visible device; 0 where the driver's management library is missing (some containers)."""
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _detect_dma_connectivity  # type: ignore[attr-defined]

    try:
        row: list[int] = _detect_dma_connectivity(DeviceType.CUDA, "nvlink").matrix[index]
    except RuntimeError:
        return [0] * torch.cuda.device_count()
    return row


def _has_native_atomics(index: int, other: int) -> bool:
    """Ask the driver whether one device's atomics work in the other's memory, as they do over NVLink alone."""
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
