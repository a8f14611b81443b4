"""Tensors that refuse all uses of their values, and the parameters from before ``fully_shard``, which become such tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor


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


class RetiredParameter(RefusingTensor, nn.Parameter):
    """A parameter from before ``fully_shard``: it can be asked for its shape and dtype, and refuses all else.

    A module that was tied to a sharded one and is not sharded itself would compute with a copy that no optimizer
    updates, and an optimizer from before would update what no forward reads; both without a word. Parameters get
    this class when their values have moved to a sharded buffer (``retire``).

    Raises:
        RuntimeError: from any use of its values or its gradient.
    """

    # What a later fully_shard, an optimizer's constructor and an error message may ask.
    answered = ("device", "dtype", "is_leaf", "is_meta", "layout", "ndim", "requires_grad", "shape")
    answered_functions = (
        torch.Tensor.dim,
        torch.Tensor.numel,
        torch.Tensor.size,
        torch.is_floating_point,
        torch.is_complex,
    )

    @classmethod
    def refuse(cls, use: str, args: Sequence[Any]) -> NoReturn:
        raise RuntimeError(
            f"a parameter must not be used once fully_shard has sharded it, got {use!r} of one from before; if it is "
            "a tied weight, call fully_shard also on the module that holds it (or on one around both); if it is an "
            "optimizer's, build the optimizer after fully_shard"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"RetiredParameter(shape={list(self.shape)}, dtype={self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            "a parameter from before fully_shard must not be copied or saved, got one that is sharded now"
        )

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__reduce_ex__(4)


class RetiredDTensor(RetiredParameter, DTensor):
    """The same for a parameter that was a DTensor."""

    __slots__ = ()


def retire(parameter: nn.Parameter) -> None:
    """Make every use of the parameter's values an error, and free them where nothing else refers to them."""
    is_placed = isinstance(parameter, DTensor)
    if is_placed:
        parameter._local_tensor = torch.empty(0, device="meta")  # type: ignore[attr-defined]
    parameter.__class__ = RetiredDTensor if is_placed else RetiredParameter


def attribute_of(function: Callable[..., Any]) -> str | None:
    """Return the name of the attribute that this accessor reads or writes, None if it is no accessor."""
    return getattr(getattr(function, "__self__", None), "__name__", None)
