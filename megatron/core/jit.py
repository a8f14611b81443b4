"""Functions of tensors that `torch.compile` turns into few kernels on CUDA, and that run as they stand elsewhere.

[Note: fused functions] What is compiled is a function of tensors without autograd: the forward or the backward of a
`torch.autograd.Function`, which says itself what is kept for backward. So nothing of a module is traced (a sharding
engine swaps parameters under it), recomputation and saved-tensor hooks see an ordinary function, and a function is
compiled once for all layers. On CPU, where compiling costs more than it gains, the same arithmetic runs eagerly.

[Note: one code for each width] What torch.compile has met in two sizes it compiles for any size, and a kernel that must divide
by widths that it does not know is several times slower (SwiGLU's backward, 14,336 wide: 1.14 ms against 0.2). The number of rows may
change from step to step (tokens of experts, other lengths); widths differ between layers (dense and expert ones, queries and keys),
and each gets code of its own.
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
    """A function of tensors, the first of which says by its device whether it may be compiled.

    Source: ours; Megatron-Core's ``jit_fuser`` compiles when the function is defined.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.eager = function
        self._compiled: dict[tuple[int, ...], Callable[..., Any]] = {}
        self._failed = False

    def __call__(self, compiled: bool, first: torch.Tensor, *rest: Any) -> Any:
        """The function's value of (first, *rest), from compiled code where asked for and possible.

        Where the compiler fails, the plain function runs, then and later, and one log line says why.
        """
        if not is_compiled(compiled, first) or self._failed:
            return self.eager(first, *rest)
        widths = first.shape[1:]
        compiled_for_widths = self._compiled.get(widths)
        if compiled_for_widths is None:
            # Without fullgraph: a function that has met too many shapes runs the next one eagerly, and does not raise.
            compiled_for_widths = self._compiled[widths] = torch.compile(_renamed(self.eager, widths))
        try:
            # Values only: the compiler would guard on requires_grad, and warns where it meets a tensor that is no leaf.
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
    """The function under a name of its own for these widths: the compiler remembers sizes by file, line and name."""
    name = "_".join((function.__name__, *map(str, widths)))
    code = function.__code__.replace(co_name=name)
    renamed = types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    renamed.__kwdefaults__ = function.__kwdefaults__
    return renamed


def is_compiled(compiled: bool, first: torch.Tensor) -> bool:
    """Whether a ``Fusible`` with this first argument runs compiled where ``compiled`` asks for it."""
    return compiled and first.is_cuda and _can_compile()


def why_not_compiled() -> str | None:
    """What torch.compile lacks on this machine for CUDA, or None where it lacks nothing."""
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
