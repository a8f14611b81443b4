"""The class of parameters from before ``fully_shard``: whoever still holds one must not use it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

# What a later fully_shard, an optimizer's constructor and an error message may ask.
_QUESTIONS = ("device", "dtype", "is_leaf", "is_meta", "layout", "ndim", "requires_grad", "shape")
_FUNCTIONS = (torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.size, torch.is_floating_point, torch.is_complex)


class RetiredParameter(nn.Parameter):
    """A parameter from before ``fully_shard``: it can be asked for its shape and dtype, and refuses all else.

    A module that was tied to a sharded one and is not sharded itself would compute with a copy that no optimizer
    updates, and an optimizer from before would update what no forward reads; both without a word. Parameters get
    this class when their values have moved to a sharded buffer (``retire``).

    Raises:
        RuntimeError: from any use of its values or its gradient.
    """

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        asked = getattr(getattr(function, "__self__", None), "__name__", None)
        if (function.__name__ == "__get__" and asked in _QUESTIONS) or function in _FUNCTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        name = asked or function.__name__
        raise RuntimeError(
            f"a parameter must not be used once fully_shard has sharded it, got {name!r} of one from before; if it is "
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


def retire(parameter: nn.Parameter) -> None:
    """Make every use of the parameter's values an error."""
    parameter.__class__ = RetiredParameter
