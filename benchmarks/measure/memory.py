"""Device memory of an engine: what PyTorch's allocator counts, and what was allocated past it."""

from __future__ import annotations

import gc
import os

import torch


def use_expandable_segments() -> None:
    """Let PyTorch's allocator grow its segments in place. Call it before the first allocation.

    The environment variable is for those who read it later; the allocator may have read it when torch was imported.
    """
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    os.environ.pop("PYTORCH_ALLOC_CONF", None)  # it takes precedence over the other
    if torch.cuda.is_available():
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


class MemoryWatch:
    """Peaks in bytes on this rank's device since the watch was made. On a CPU all are 0.

    ``outside`` is what the device says beyond what PyTorch's allocator has reserved: symmetric memory, buffers of
    communicators, graphs, and anything else that the process has allocated since. ``note`` samples it.

    Args:
        shares_device: other processes allocate on the device too, so that ``outside`` cannot be told: 0.
    """

    def __init__(self, device: torch.device, *, shares_device: bool = False) -> None:
        self._shares_device = shares_device
        self._is_cuda = device.type == "cuda"
        self._device = device
        self.peak_allocated = self.peak_reserved = self.peak_outside = 0
        self.steady_allocated = self.steady_reserved = 0
        self.at_rest = 0  # at the last note, above the start, past the allocator too
        gc.collect()
        if self._is_cuda:
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        self._outside_at_start = self._outside()
        self.allocated_at_start = torch.cuda.memory_allocated(device) if self._is_cuda else 0

    def note(self) -> None:
        """Update the peaks."""
        if not self._is_cuda:
            return
        self.steady_allocated = max(self.steady_allocated, torch.cuda.max_memory_allocated(self._device))
        self.steady_reserved = max(self.steady_reserved, torch.cuda.max_memory_reserved(self._device))
        self.peak_allocated = max(self.peak_allocated, self.steady_allocated)
        self.peak_reserved = max(self.peak_reserved, self.steady_reserved)
        outside = self._outside() - self._outside_at_start
        self.peak_outside = max(self.peak_outside, outside)
        self.at_rest = torch.cuda.memory_allocated(self._device) - self.allocated_at_start + outside

    def begin_steady(self) -> None:
        """Count the steady peaks from here on."""
        self.note()
        self.steady_allocated = self.steady_reserved = 0
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats(self._device)

    def _outside(self) -> int:
        if not self._is_cuda or self._shares_device:
            return 0
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free - torch.cuda.memory_reserved(self._device)
