"""``.grad`` of a sharded parameter, as its user meets it: who writes it, and what it is while sums wait."""

from __future__ import annotations

import operator
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any, ClassVar, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp.buffers.param_slots import RefusingTensor, each

GRAD = operator.attrgetter("grad")


def set_grads(parameters: Iterable[nn.Parameter], grads: Iterable[torch.Tensor | None]) -> None:
    """Set ``.grad`` of these parameters. Nothing else in the engine writes ``.grad`` of a parameter of a group."""
    # ``for parameter, grad in zip(parameters, grads): parameter.grad = grad``, as a map that runs in C, since no Python loop
    # may run over parameters in a step. See [Note: the host's budget].
    deque(map(setattr, parameters, repeat("grad"), grads), maxlen=0)


def local_gradient(grad: torch.Tensor, own: Any) -> torch.Tensor:
    """Return this rank's part of what the user has put into ``param.grad``, placed as the main gradient ``own`` is.

    Raises:
        ValueError: it is no DTensor, and not of the shape of this rank's part.

    Ranks: all of the mesh, where it is a DTensor that is placed otherwise.
    """
    if isinstance(grad, DTensor):
        # Not by ``redistribute`` where nothing moves: ``Muon`` comes here with each gradient of each step.
        placed = grad if grad.placements == own.placements else grad.redistribute(own.device_mesh, own.placements)
        return placed._local_tensor
    if grad.shape != own._local_tensor.shape:
        raise ValueError(
            f"param.grad must be a DTensor, or this rank's part of shape {list(own._local_tensor.shape)}, got a tensor of shape "
            f"{list(grad.shape)}; distribute it as the parameter is, with distribute_tensor(grad, param.device_mesh, param.placements)"
        )
    return grad


class PendingGradient(RefusingTensor):
    """The gradient of a parameter whose sum over microbatches is not reduced over all ranks yet. It has no values.

    Where the strategy keeps such sums aside, ``param.grad`` being None would have two faults: ``zero_grad`` could not be
    noticed, so that sums that were given up would enter the next gradient; and an optimizer would skip the parameter
    without a word. Setting ``param.grad`` to None or to another tensor, or zeroing this one, gives the sum up.

    Raises:
        RuntimeError: from any use of its values.
    """

    # What zero_grad and repr ask of a gradient.
    answered = ("device", "dtype", "grad_fn", "is_leaf", "is_sparse", "layout", "ndim", "requires_grad", "shape")
    answered_functions = (
        torch.Tensor.dim,
        torch.Tensor.numel,
        torch.Tensor.size,
        torch.Tensor.requires_grad_,
        torch.Tensor.eq,
    )

    # Weak: the group's ``PendingGradients`` refers to these, and a cycle would keep the gradients' memory until a collection.
    _owner: weakref.ref[PendingGradients]
    _index: int

    @staticmethod
    def __new__(
        cls, owner: PendingGradients, index: int, parameter: nn.Parameter, dtype: torch.dtype
    ) -> PendingGradient:
        own: PendingGradient = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=dtype, device=parameter.device
        )
        own._owner, own._index = weakref.ref(owner), index
        return own

    def _zero(self) -> PendingGradient:
        owner = self._owner()
        if owner is not None:
            owner.zero(self._index)
        return self

    served: ClassVar[dict[Any, Any]] = {
        torch.Tensor.data.__get__: lambda own: own,  # type: ignore[attr-defined]
        torch.Tensor.zero_: _zero,
        torch._foreach_zero_: lambda grads: each(torch.Tensor.zero_, grads),
    }

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
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        cls.refuse(str(function), args)

    @property
    def name(self) -> str:
        """The parameter's full name."""
        owner = self._owner()
        return "a parameter" if owner is None else owner.name_of(self._index)

    def to_local(self, *_: Any, **__: Any) -> torch.Tensor:
        """Refuse, as all uses of a DTensor's values."""
        self.refuse("to_local", [self])

    full_tensor = redistribute = to_local

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PendingGradient({self.name}, shape={list(self.shape)}, dtype={self.dtype})"


class PendingGradients:
    """The [T] pending gradients of a group. ``Gradients`` puts them into ``param.grad``. [Note: sums that wait].

    Args:
        sharded: [T] parameters whose ``.grad`` they are while sums wait.
        dtype: of main gradients.
    """

    def __init__(self, sharded: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        self._sharded = sharded
        # Made once: a step puts the same objects into ``param.grad``, so that identity tells whether the user has replaced one.
        self._own = [PendingGradient(self, i, p, dtype) for i, p in enumerate(sharded)]
        self._beneath: list[torch.Tensor | None] = [None] * len(sharded)  # what ``param.grad`` was before
        self._zeroed: set[int] = set()

    def name_of(self, index: int) -> str:
        """Return the full name of parameter ``index``."""
        group = self._sharded[index]._fsdp_group()  # type: ignore[attr-defined]
        return "a parameter" if group is None else group.name_of(index)

    def cover(self) -> Sequence[torch.Tensor]:
        """Return the [T] pending gradients, to be put over what ``param.grad`` holds now."""
        self._beneath = list(map(GRAD, self._sharded))
        return self._own

    def zero(self, index: int) -> None:
        """Zero the gradient of parameter ``index``, which gives its sum up."""
        beneath = self._beneath[index]
        if beneath is not None:
            beneath.zero_()
        self._zeroed.add(index)

    def given_up(self) -> list[int]:
        """Return the indices of the parameters whose sums the user gave up since ``cover``."""
        # The usual case, without a loop over parameters: each backward asks.
        if not self._zeroed and all(map(operator.is_, map(GRAD, self._sharded), self._own)):
            return []
        pairs = enumerate(zip(self._sharded, self._own, strict=True))
        return [i for i, (p, own) in pairs if p.grad is not own or i in self._zeroed]

    def held(self) -> list[torch.Tensor | None]:
        """Return [T] what ``param.grad`` would be without them."""
        triples = zip(map(GRAD, self._sharded), self._own, self._beneath, strict=True)
        return [beneath if grad is own else grad for grad, own, beneath in triples]

    def zeroed(self) -> list[int]:
        """Return the indices of parameters whose gradient was zeroed while there was nothing but the sum: it is to be zero.

        Frozen ones had no sum, and keep no gradient.
        """
        lone = [(i, self._sharded[i]) for i in self._zeroed if self._beneath[i] is None]
        return [i for i, parameter in lone if parameter.requires_grad and parameter.grad is self._own[i]]

    def uncover(self) -> list[torch.Tensor | None]:
        """Return [T] what ``param.grad`` is to be now, and forget what was beneath."""
        held = self.held() if self.given_up() else self._beneath
        self._beneath, self._zeroed = [None] * len(held), set()
        return held


def refuse_earlier_hooks(parameter: nn.Parameter, name: str) -> None:
    """Raise a ValueError if a parameter that is about to be sharded has hooks, which nobody would call."""
    for register, hooks in (
        ("register_hook", parameter._backward_hooks),
        ("register_post_accumulate_grad_hook", parameter._post_accumulate_grad_hooks),
    ):
        if hooks:
            raise ValueError(
                f"parameter {name} must have no hooks when it is sharded, got one from {register}, which would never be "
                "called; register_post_accumulate_grad_hook on the sharded parameter, after fully_shard"
            )
