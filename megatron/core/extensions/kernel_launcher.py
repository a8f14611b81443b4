"""Repeated launches of a Triton kernel without the Python of Triton's own launch, which takes 50 us of the host each time."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

# To measure what this file gains: "plain" launches through Triton each time.
_LAUNCHES = os.environ.get("FSDP_TRITON_LAUNCHER", "cached")
if _LAUNCHES not in ("cached", "plain"):
    raise ValueError(f"FSDP_TRITON_LAUNCHER must be cached or plain, got {_LAUNCHES!r}; leave it unset for cached")


class KernelLauncher:
    """Launches of one kernel: Triton compiles at the first of a kind, and later ones call what it compiled.

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
        """Launch the kernel on the current stream, and return the function that launches it again.

        Returns:
            A function of the tensors' addresses, the numbers and the constants. It is valid for tensors of the same dtypes
            and alignment on the same device, which must be the current one. None under Triton's interpreter, which compiles
            nothing, and with ``FSDP_TRITON_LAUNCHER=plain``: the next launch needs the tensors again.
        """
        if _LAUNCHES == "plain":
            self._kernel[(num_programs,)](*tensors, *numbers, *constants, **self._options)
            return None
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
