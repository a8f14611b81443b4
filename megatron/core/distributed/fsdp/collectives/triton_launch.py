"""Launching a Triton kernel again and again without what its launcher does in Python each time (50 us of the host)."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch


class KernelLauncher:
    """Launches one kernel; from the second launch of a kind on straight through what Triton compiled at the first.

    Args:
        kernel: a function under ``triton.jit``, whose arguments are tensors (or None), then numbers, then constants.
        num_warps: of a program.
    """

    def __init__(self, kernel: Any, *, num_warps: int) -> None:
        self._kernel, self._num_warps = kernel, num_warps
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self,
        num_programs: int,
        tensors: Sequence[torch.Tensor | None],
        numbers: Sequence[int | float],
        constants: tuple[Any, ...],
    ) -> None:
        """Afterwards the kernel is launched on the current stream of the current device."""
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        given = [address for address in addresses if address is not None]
        # What Triton compiles for: dtypes, and which addresses and integers are multiples of 16. Aligned tensors alone
        # are launched past it: what else there is comes once.
        is_plain = functools.reduce(operator.or_, given) % 16 == 0 and all(
            n % 16 == 0 for n in numbers if type(n) is int
        )
        kind = (constants, *[None if tensor is None else tensor.dtype for tensor in tensors])
        compiled = self._compiled.get(kind) if is_plain else None
        if compiled is not None:
            compiled[num_programs, 1, 1](*addresses, *numbers, *constants)
            return
        compiled = self._kernel[(num_programs,)](*tensors, *numbers, *constants, num_warps=self._num_warps)
        if compiled is not None and is_plain:  # interpreted kernels give nothing back
            self._compiled[kind] = compiled
