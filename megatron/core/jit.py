"""Functions of tensors that `torch.compile` turns into few kernels on CUDA, and that run eagerly elsewhere.

[Note: fused functions] Only functions of tensors without autograd are compiled: the forward or the backward of a
`torch.autograd.Function`, which decides what is kept for backward. So no module is traced (a sharding engine swaps its
parameters), recomputation and saved-tensor hooks see an ordinary function, and a function is compiled once for all layers.
On CPU, where compilation costs more than it gains, the same arithmetic runs eagerly.

[Note: one code for each width] torch.compile makes code for any size once it has seen two sizes, and a kernel that divides by
widths that are not constants is several times slower (SwiGLU, 14,336 wide: 1.14 ms against 0.2 ms). The number of
rows may change from step to step (tokens of experts, other lengths). Widths differ between layers (dense and expert layers,
queries and keys), so each width gets its own code.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import shutil
import types
from collections.abc import Callable
from typing import Any

import torch

_logger = logging.getLogger(__name__)


class Fusible:
    """A function of tensors that is compiled where its first argument is on CUDA.

    Attributes:
        kernel: takes the function's arguments and is called instead of the compiled function, where that one would be slow
            however it is written; None: there is none.

    Source: ours; Megatron-Core's ``jit_fuser`` compiles when the function is defined.
    """

    kernel: Callable[..., Any] | None = None

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.eager = function
        self._compiled: dict[tuple[int, ...], Callable[..., Any]] = {}
        self._failed = False

    def __call__(self, compiled: bool, first: torch.Tensor, *rest: Any) -> Any:
        """Call the function on (first, *rest), compiled where ``compiled`` asks for it and it is possible.

        Where the compiler fails, the eager function runs, now and later, and one log line says why.
        """
        if not is_compiled(compiled, first) or self._failed:
            return self.eager(first, *rest)
        if self.kernel is not None:
            return self.kernel(first, *rest)
        widths = first.shape[1:]
        compiled_for_widths = self._compiled.get(widths)
        if compiled_for_widths is None:
            # Without fullgraph, a function that has seen too many shapes runs the next one eagerly instead of raising.
            compiled_for_widths = self._compiled[widths] = torch.compile(_renamed(self.eager, widths))
        try:
            # Detached: the compiler would guard on requires_grad, and warns about tensors that are no leaves.
            return compiled_for_widths(*(x.detach() if isinstance(x, torch.Tensor) else x for x in (first, *rest)))
        except Exception as error:
            if not _is_compilers(error):
                raise
            _logger.warning(
                "%s runs without compilation from here on: torch.compile failed (%s: %s)",
                self.eager.__name__,
                type(error).__name__,
                str(error).strip().partition("\n")[0],
            )
            self._failed = True
        return self.eager(first, *rest)


def _renamed(function: Callable[..., Any], widths: tuple[int, ...]) -> Callable[..., Any]:
    """Copy the function under a name for these widths: the compiler remembers sizes by file, line and name."""
    name = "_".join((function.__name__, *map(str, widths)))
    code = function.__code__.replace(co_name=name)
    renamed = types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    renamed.__kwdefaults__ = function.__kwdefaults__
    return renamed


def is_compiled(compiled: bool, first: torch.Tensor) -> bool:
    """Return whether a ``Fusible`` with this first argument runs compiled where ``compiled`` asks for it."""
    return compiled and first.is_cuda and _can_compile()


def why_not_compiled() -> str | None:
    """Say what torch.compile lacks on this machine for CUDA; None: nothing."""
    try:
        importlib.import_module("triton")
    except ImportError:
        return "Triton is not installed"
    if torch.cuda.get_device_capability() < (7, 0):
        return "Triton needs a GPU of compute capability 7.0 or more"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")):
        return "Triton needs a C compiler (gcc, clang, or one named by CC)"
    return None


@functools.cache
def _can_compile() -> bool:
    reason = why_not_compiled()
    if reason is not None:
        _logger.warning("fused functions run as plain PyTorch, which is slower: %s", reason)
    return reason is None


def _is_compilers(error: Exception) -> bool:
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


jit_fuser: Callable[..., Any] = torch.compile
"""Megatron-Core's decorator of callers' functions: ``torch.compile``, until ``disable_jit_fuser``."""


def enable_jit_fuser() -> None:
    """Let ``jit_fuser``, where it is read from here on, be ``torch.compile``."""
    globals()["jit_fuser"] = torch.compile


def disable_jit_fuser() -> None:
    """Let ``jit_fuser``, where it is read from here on, leave functions as they are."""
    globals()["jit_fuser"] = _plain
