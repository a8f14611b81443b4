"""What ``param.grad`` is while sums over microbatches wait to be reduced over the ranks."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any, NoReturn

import torch
from torch import nn

from megatron.core.distributed.fsdp.buffers.param_slots import each
from megatron.core.distributed.fsdp.buffers.retired_parameter import RefusingTensor, attribute_of

_GRAD = operator.attrgetter("grad")
_BENEATH = operator.attrgetter("beneath")


class PendingGradient(RefusingTensor):
    """The gradient of a parameter whose sum over microbatches is not reduced over all ranks yet. It has no values.

    Where the strategy keeps such sums aside, ``param.grad`` being None would have two faults: ``zero_grad`` could not be
    noticed, so that sums that were given up would enter the next gradient; and an optimizer would skip the parameter
    without a word. Setting ``param.grad`` to None or to another tensor, or zeroing this one, gives the sum up.

    Attributes:
        beneath: what ``param.grad`` was before, to which the sum will be added.

    Raises:
        RuntimeError: from any use of its values.
    """

    # What zero_grad and repr ask of a gradient.
    answered = ("device", "dtype", "grad_fn", "is_leaf", "is_sparse", "layout", "ndim", "requires_grad", "shape")
    answered_functions = (torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.size, torch.Tensor.requires_grad_)

    beneath: torch.Tensor | None
    _given_up: set[int]
    _index: int
    _parameter: weakref.ref[nn.Parameter]

    @staticmethod
    def __new__(cls, parameter: nn.Parameter, dtype: torch.dtype, *, index: int, given_up: set[int]) -> PendingGradient:
        own: PendingGradient = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=dtype, device=parameter.device
        )
        own.beneath, own._given_up, own._index, own._parameter = None, given_up, index, weakref.ref(parameter)
        return own

    def _zero(self) -> None:
        if self.beneath is not None:
            self.beneath.zero_()
        self._given_up.add(self._index)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function.__name__ == "__get__" and attribute_of(function) == "data":
            return args[0]
        if function is torch.Tensor.zero_:
            args[0]._zero()
            return args[0]
        if function is torch._foreach_zero_:
            others = [grad for grad in args[0] if not isinstance(grad, cls)]
            for grad in args[0]:
                if isinstance(grad, cls):
                    grad._zero()
            if others:
                torch._foreach_zero_(others)
            return None
        return super().__torch_function__(function, types, args, kwargs)

    @classmethod
    def refuse(cls, use: str, args: Sequence[Any]) -> NoReturn:
        found = [*args, *(item for value in args if isinstance(value, list | tuple) for item in value)]
        name = next((value.name for value in found if isinstance(value, PendingGradient)), "a parameter")
        raise RuntimeError(
            f"the gradient of {name} must not be used before the step's last microbatch has come, got {use!r}: sums of this rank "
            "alone wait to be reduced; run the last backward under microbatch(model, is_last=True), or outside of no_sync(), or "
            "give the sums up with zero_grad()"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        cls.refuse(str(function), args)

    @property
    def name(self) -> str:
        """The parameter's full name."""
        parameter = self._parameter()
        group = getattr(parameter, "_fsdp_group", lambda: None)()
        return group.name_of(self._index) if group is not None else "a parameter"

    def to_local(self, *_: Any, **__: Any) -> torch.Tensor:
        """Refuse, as all uses of a DTensor's values."""
        self.refuse("to_local", [self])

    full_tensor = redistribute = to_local

    def __eq__(self, other: object) -> Any:
        if other is None:  # list.count(None) asks
            return False
        self.refuse("__eq__", [self])

    __hash__ = torch.Tensor.__hash__

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PendingGradient({self.name}, shape={list(self.shape)}, dtype={self.dtype})"


class PendingGradients:
    """The [T] pending gradients of a group.

    Args:
        sharded: [T] parameters whose ``.grad`` they are while sums wait.
        dtype: of main gradients.
    """

    def __init__(self, sharded: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        self._sharded = sharded
        self._given_up: set[int] = set()
        self._own = [PendingGradient(p, dtype, index=i, given_up=self._given_up) for i, p in enumerate(sharded)]

    def offer(self) -> None:
        """Put them into ``param.grad``, over what that holds."""
        each(setattr, self._own, repeat("beneath"), list(map(_GRAD, self._sharded)))
        each(setattr, self._sharded, repeat("grad"), self._own)

    def given_up(self) -> list[int]:
        """Return the indices of the parameters whose sums the user gave up since ``offer``."""
        if not self._given_up and all(map(operator.is_, map(_GRAD, self._sharded), self._own)):
            return []
        pairs = enumerate(zip(self._sharded, self._own, strict=True))
        return [i for i, (p, own) in pairs if p.grad is not own or i in self._given_up]

    def held(self) -> list[torch.Tensor | None]:
        """Return [T] what ``param.grad`` would be without them."""
        pairs = zip(map(_GRAD, self._sharded), self._own, strict=True)
        return [own.beneath if grad is own else grad for grad, own in pairs]

    def withdraw(self) -> list[int]:
        """Put back into ``param.grad`` what they were put over.

        Returns:
            The indices of parameters whose gradient was zeroed while there was nothing but the sum: it is to be zero. Frozen ones
            had no sum, and keep no gradient.
        """
        zeroed: list[int] = []
        if self.given_up():
            held = self.held()
            pairs = [(i, self._sharded[i]) for i in self._given_up if held[i] is None]
            zeroed = [i for i, parameter in pairs if parameter.requires_grad and parameter.grad is self._own[i]]
            self._given_up.clear()
            each(setattr, self._sharded, repeat("grad"), held)
        else:
            each(setattr, self._sharded, repeat("grad"), map(_BENEATH, self._own))
        each(setattr, self._own, repeat("beneath"), repeat(None))
        return zeroed
