"""Hooks that users put on sharded parameters: which are served, and which groups have any."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megatron.core.distributed.fsdp.buffers.grad_sums import GradSum

Hook = Callable[[nn.Parameter], None]


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
