"""``.grad`` of a sharded parameter, as its user meets it: who writes it, what it is while sums wait, and hooks on it."""

from __future__ import annotations

import operator
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, NoReturn

import torch
from torch import nn

from megatron.core.distributed.fsdp.buffers.grad_sums import GradSum
from megatron.core.distributed.fsdp.buffers.retired_parameter import RefusingTensor, attribute_of

GRAD = operator.attrgetter("grad")
Hook = Callable[[nn.Parameter], None]


def set_grads(parameters: Iterable[nn.Parameter], grads: Iterable[torch.Tensor | None]) -> None:
    """Set ``.grad`` of these parameters. Nothing else in the engine writes ``.grad`` of a parameter of a group."""
    # ``for parameter, grad in zip(parameters, grads): parameter.grad = grad``, as a map that runs in C, since no Python loop
    # may run over parameters in a step. See [Note: the host's budget].
    deque(map(setattr, parameters, repeat("grad"), grads), maxlen=0)


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
    answered_functions = (torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.size, torch.Tensor.requires_grad_)

    _shared: _Shared
    _index: int
    _parameter: weakref.ref[nn.Parameter]

    @staticmethod
    def __new__(cls, parameter: nn.Parameter, dtype: torch.dtype, *, index: int, shared: _Shared) -> PendingGradient:
        own: PendingGradient = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=dtype, device=parameter.device
        )
        own._shared, own._index, own._parameter = shared, index, weakref.ref(parameter)
        return own

    def _zero(self) -> None:
        beneath = self._shared.beneath[self._index]
        if beneath is not None:
            beneath.zero_()
        self._shared.given_up.add(self._index)

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


@dataclass
class _Shared:
    """What the pending gradients of a group know together, and what holds none of them: that would be a cycle.

    Attributes:
        beneath: [T] what ``param.grad`` was before, to which the sums will be added.
        given_up: indices of those that were zeroed.
    """

    beneath: list[torch.Tensor | None]
    given_up: set[int] = field(default_factory=set)

    def cover(self, beneath: list[torch.Tensor | None]) -> None:
        """Remember what the pending gradients are put over."""
        self.beneath = beneath


class PendingGradients:
    """The [T] pending gradients of a group. ``Gradients`` puts them into ``param.grad``. [Note: sums that wait].

    Args:
        sharded: [T] parameters whose ``.grad`` they are while sums wait.
        dtype: of main gradients.
    """

    def __init__(self, sharded: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        self._sharded, self._shared = sharded, _Shared([None] * len(sharded))
        self._own = [PendingGradient(p, dtype, index=i, shared=self._shared) for i, p in enumerate(sharded)]

    def cover(self) -> Sequence[torch.Tensor]:
        """Return the [T] pending gradients, to be put over what ``param.grad`` holds now."""
        self._shared.cover(list(map(GRAD, self._sharded)))
        return self._own

    def given_up(self) -> list[int]:
        """Return the indices of the parameters whose sums the user gave up since ``cover``."""
        if not self._shared.given_up and all(map(operator.is_, map(GRAD, self._sharded), self._own)):
            return []
        pairs = enumerate(zip(self._sharded, self._own, strict=True))
        return [i for i, (p, own) in pairs if p.grad is not own or i in self._shared.given_up]

    def held(self) -> list[torch.Tensor | None]:
        """Return [T] what ``param.grad`` would be without them."""
        triples = zip(map(GRAD, self._sharded), self._own, self._shared.beneath, strict=True)
        return [beneath if grad is own else grad for grad, own, beneath in triples]

    def zeroed(self) -> list[int]:
        """Return the indices of parameters whose gradient was zeroed while there was nothing but the sum: it is to be zero.

        Frozen ones had no sum, and keep no gradient.
        """
        triples = [
            (i, self._sharded[i], self._own[i]) for i in self._shared.given_up if self._shared.beneath[i] is None
        ]
        return [i for i, parameter, own in triples if parameter.requires_grad and parameter.grad is own]

    def uncover(self) -> list[torch.Tensor | None]:
        """Return [T] what ``param.grad`` is to be now, and forget what was beneath."""
        held = self.held() if self.given_up() else self._shared.beneath
        self._shared.cover([None] * len(held))
        self._shared.given_up.clear()
        return held


class PostAccumulateGradHooks(OrderedDict[int, Hook]):
    """The hooks of one parameter, as ``register_post_accumulate_grad_hook`` keeps them; the engine calls them.

    Autograd would, if it accumulated into the sharded parameter; but it is the engine that fills ``param.grad``. A dict that
    tells of its first entry costs a step nothing while there are no hooks.

    Args:
        table: of the parameter's group.
        name: of the parameter, for errors.
    """

    def __init__(self, table: GradHooks, name: str) -> None:
        super().__init__()
        self._table, self._name = weakref.ref(table), name

    def __setitem__(self, key: int, hook: Hook) -> None:
        table = self._table()
        if table is not None:
            table.note(self._name)
        super().__setitem__(key, hook)

    def __reduce__(self) -> Any:
        return OrderedDict, ()


class RefusedHooks(OrderedDict[int, Any]):
    """Takes no entry: in place of the dict in which ``register_hook`` keeps its hooks.

    Args:
        name: of the parameter, for errors.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __setitem__(self, key: int, hook: Any) -> None:
        raise NotImplementedError(
            f"register_hook on the sharded parameter {self._name} is not served: no backward computes a gradient of it, only of "
            "the unsharded one; use register_post_accumulate_grad_hook, which is called once its reduced gradient is in "
            "param.grad"
        )

    def __reduce__(self) -> Any:
        return OrderedDict, ()


class RefusedNode(weakref.ref[nn.Parameter]):
    """In place of a sharded parameter's ``view_as`` and ``expand_as``, by which its accumulation node is asked for.

    ``parameter.view_as(parameter).grad_fn.next_functions[0][0]`` is how ``torch.autograd.graph.get_gradient_edge``, optimizers in
    backward and schedules that compute gradients of weights apart from backward come to it. A weak reference, since copies of
    parameters leave these out.
    """

    _function: Callable[..., torch.Tensor]
    _name: str

    def __new__(cls, parameter: nn.Parameter, function: Callable[..., torch.Tensor], name: str) -> RefusedNode:
        own = super().__new__(cls, parameter)
        own._function, own._name = function, name
        return own

    def __init__(self, *_: Any) -> None:
        """Do nothing: a reference has its referent from the beginning."""

    def __call__(self, other: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        parameter = super().__call__()
        assert parameter is not None, "called through the parameter"
        if other is parameter and parameter.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                f"the accumulation node of the sharded parameter {self._name} must not be asked for (view_as, expand_as, "
                "get_gradient_edge): no backward comes to it, only to that of the unsharded one, so that hooks on it would never be "
                "called. Use register_post_accumulate_grad_hook in place of such hooks and of _apply_optimizer_in_backward, and "
                "pipeline schedules whose backward is whole (Schedule1F1B, ScheduleInterleaved1F1B) in place of zero-bubble ones"
            )
        return self._function(parameter, other)


class GradHooks:
    """The hooks on the [T] sharded parameters of a group.

    Attributes:
        has_any: a hook was registered, ever.
    """

    def __init__(self, sharded: list[nn.Parameter], names: list[str], grad_sums: list[GradSum]) -> None:
        self.has_any = False
        self._sharded = sharded
        self._waits_for_use = any(grad_sum.waits_for_use for grad_sum in grad_sums)
        for parameter, name in zip(sharded, names, strict=True):
            parameter._post_accumulate_grad_hooks = PostAccumulateGradHooks(self, name)
            parameter._backward_hooks = RefusedHooks(name)
            for function in (torch.Tensor.view_as, torch.Tensor.expand_as):
                setattr(parameter, function.__name__, RefusedNode(parameter, function, name))

    def note(self, name: str) -> None:
        """Take notice of a hook on the parameter of this name.

        Raises:
            NotImplementedError: at the end of a backward its gradient is not complete.
        """
        if self._waits_for_use:
            raise NotImplementedError(
                f"register_post_accumulate_grad_hook on {name} is not served: two pipeline stages hold it, and their "
                "gradients are summed when the optimizer steps, after the last backward; step after backward"
            )
        self.has_any = True

    def call(self) -> None:
        """Call the hooks of the parameters that have a gradient, in parameter order."""
        for parameter in self._sharded:
            if parameter.grad is not None:
                for hook in list(parameter._post_accumulate_grad_hooks.values()):
                    hook(parameter)


def refuse_earlier_hooks(parameter: nn.Parameter, name: str) -> None:
    """Raise a ValueError if a parameter that is about to be sharded has hooks, which nobody would call."""
    for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(parameter, kind, None):
            register = {"_backward_hooks": "register_hook"}.get(kind, "register_post_accumulate_grad_hook")
            raise ValueError(
                f"parameter {name} must have no hooks when it is sharded, got one from {register}, which would never be "
                "called; register_post_accumulate_grad_hook on the sharded parameter, after fully_shard"
            )
