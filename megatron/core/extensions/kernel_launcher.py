"""Launching a Triton kernel again and again without what its launcher does in Python each time (50 us of the host)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class KernelLauncher:
    """Launches one kernel; from the second launch of a kind on straight through what Triton compiled at the first.

    Args:
        kernel: a function under ``triton.jit``, whose arguments are tensors (or None), then numbers, then constants.
        options: of its compilation, such as ``num_warps``.
    """

    def __init__(self, kernel: Any, **options: Any) -> None:
        self._kernel, self._options = kernel, options
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self,
        num_programs: int,
        tensors: Sequence[torch.Tensor | None],
        numbers: Sequence[int | float],
        constants: tuple[Any, ...],
    ) -> Callable[..., None] | None:
        """Afterwards the kernel is launched on the current stream; returns what launches it again.

        That takes the addresses, the numbers and the constants, and asks for tensors of the same dtypes and alignment
        on the same device, which must be the current one. None where it was interpreted, which compiles nothing.
        """
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        # What Triton compiles for: dtypes, and which addresses and integers are multiples of 16, or 1.
        kind = (
            constants,
            *[None if tensor is None else (tensor.device, tensor.dtype) for tensor in tensors],
            *[address is None or address % 16 == 0 for address in addresses],
            *[(number % 16 == 0, number == 1) for number in numbers if type(number) is int],
        )
        compiled = self._compiled.get(kind)
        if compiled is None:
            compiled = self._kernel[(num_programs,)](*tensors, *numbers, *constants, **self._options)
            if compiled is None:
                return None
            self._compiled[kind] = compiled
            first: Callable[..., None] = compiled[num_programs, 1, 1]
            return first
        run: Callable[..., None] = compiled[num_programs, 1, 1]
        run(*addresses, *numbers, *constants)
        return run
