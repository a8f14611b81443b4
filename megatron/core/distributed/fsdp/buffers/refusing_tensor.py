"""Tensors that answer what may be asked of them, such as their shape, and refuse all uses of their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import torch


class RefusingTensor(torch.Tensor):
    """A tensor without values that anybody may use.

    Attributes:
        answered: names of attributes that may be read.
        answered_functions: functions that may be called.

    Raises:
        RuntimeError: from any other use; ``refuse`` makes the message.
    """

    answered: ClassVar[tuple[str, ...]] = ()
    answered_functions: ClassVar[tuple[Callable[..., Any], ...]] = ()

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        asked = attribute_of(function)
        if (function.__name__ == "__get__" and asked in cls.answered) or function in cls.answered_functions:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        cls.refuse(asked or function.__name__, args)

    @classmethod
    def refuse(cls, use: str, args: Sequence[Any]) -> NoReturn:
        """Raise an error that names the use."""
        raise NotImplementedError


def attribute_of(function: Callable[..., Any]) -> str | None:
    """Return the name of the attribute that this accessor reads or writes, None if it is no accessor."""
    return getattr(getattr(function, "__self__", None), "__name__", None)
