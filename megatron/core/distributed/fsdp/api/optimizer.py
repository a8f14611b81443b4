"""Any ``torch.optim`` optimizer on sharded parameters: checked before its step, seen by the next forward."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from megatron.core.distributed.fsdp.buffers.grad_sums import sum_grads
from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup, group_of
from megatron.core.distributed.fsdp.runtime.context import FsdpContext

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


def fully_shard_optimizer(optimizer: OptimizerT) -> OptimizerT:
    """Afterwards the optimizer refuses to step where that would train on wrong gradients, and frees them when cleared.

    The parameters of a sharded model work with any ``torch.optim`` optimizer as they are; its state is sharded like
    them. What this adds: ``step`` is refused in the middle of a pass, after a backward that failed, and after one that
    was not a step's last microbatch; gradients in another dtype than the main weights are cast for the step;
    ``zero_grad(set_to_none=True)`` frees the memory of main gradients at once; weights that were gathered ahead of
    the step are gathered anew.

    Args:
        optimizer: built over the parameters of a model *after* ``fully_shard``.

    Returns:
        ``optimizer``.

    Raises:
        ValueError: it holds parameters from before ``fully_shard``, whose update no forward would see.

    Ranks: all that hold the parameters.
    """
    if getattr(optimizer, "checks_its_steps", False):
        return optimizer
    groups = groups_of(optimizer)
    watch = _StepWatch(groups)
    optimizer.register_step_pre_hook(watch.before_step)
    optimizer.register_step_post_hook(watch.after_step)
    zero_grad = weakref.WeakMethod(optimizer.zero_grad)  # whoever holds the optimizer calls it; no cycle

    def zero_grad_and_free(set_to_none: bool = True) -> None:
        own = zero_grad()
        assert own is not None
        own(set_to_none=set_to_none)
        for group in watch.groups():
            group.grads.free_main_if_cleared()

    optimizer.zero_grad = zero_grad_and_free  # type: ignore[method-assign]
    return optimizer


class _StepWatch:
    """What happens around a step. It holds no groups: an optimizer that outlives its model keeps main weights alone."""

    def __init__(self, groups: list[FsdpParameterGroup]) -> None:
        self._groups = [weakref.ref(group) for group in groups]
        self._cast = [
            (parameter, parameter.dtype)
            for group in groups
            if group.dtypes.main_grads != group.dtypes.main_params
            for parameter in group.sharded
        ]
        self._kept: list[tuple[nn.Parameter, torch.Tensor]] = []

    def groups(self) -> list[FsdpParameterGroup]:
        return [group for ref in self._groups if (group := ref()) is not None]

    def before_step(self, *_: Any) -> None:
        check_step(self.groups())
        for parameter, dtype in self._cast:
            # A step that calls its superclass's step comes here twice.
            if parameter.grad is not None and parameter.grad.dtype != dtype:
                self._kept.append((parameter, parameter.grad))
                parameter.grad = parameter.grad.to(dtype)

    def after_step(self, *_: Any) -> None:
        for parameter, grad in self._kept:
            parameter.grad = grad
        self._kept.clear()
        for context in contexts_of_groups(self.groups()):
            context.weights_changed()


def contexts_of_groups(groups: Iterable[FsdpParameterGroup]) -> list[FsdpContext]:
    """The contexts that the groups are in, each once, in the order of the groups."""
    found = (group.context() for group in groups if group.context is not None)
    return list(dict.fromkeys(context for context in found if context is not None))


def check_step(groups: Sequence[FsdpParameterGroup]) -> None:
    """Afterwards the groups' main gradients are those of whole passes, on all ranks of the model.

    Raises:
        RuntimeError: a pass is under way, or has failed, or was not a step's last microbatch.
    """
    for context in contexts_of_groups(groups):
        if context.is_running:
            raise RuntimeError(
                "optimizer.step() must come after forward and backward, got a call in the middle of one, where some "
                "gradients are not reduced yet and weights are in use; call it when backward() has returned"
            )
        if context.has_failed:
            raise RuntimeError(
                "optimizer.step() needs the gradients of a whole backward, but the last one did not finish; call "
                "zero_grad() and run forward and backward again"
            )
    partial = [group.name_of(0) for group in groups if group.grads.has_partial]
    if partial:
        raise RuntimeError(
            "optimizer.step() needs gradients reduced over the ranks, but the last microbatch has not come: "
            f"{partial[0]} and {len(partial) - 1} other groups hold sums of this rank alone; run the last backward "
            "under microbatch(model, is_last=True), or outside of no_sync()"
        )
    sum_grads(groups, in_use=True)


def groups_of(optimizer: torch.optim.Optimizer) -> list[FsdpParameterGroup]:
    """The trainable groups that the optimizer's parameters belong to, each once; other parameters are passed over.

    Raises:
        ValueError: a parameter is from before ``fully_shard``.
    """
    groups: dict[FsdpParameterGroup, None] = {}
    for param_group in optimizer.param_groups:
        for parameter in param_group["params"]:
            group = group_of(parameter)
            if group is None:
                continue
            if not any(parameter is sharded for sharded in group.sharded):
                raise ValueError(
                    f"the optimizer must be built after fully_shard, got a parameter of shape {list(parameter.shape)} from "
                    "before it, whose update no forward would see; build it over model.parameters() once all layers are wrapped"
                )
            if group.trainable:
                groups[group] = None
    return list(groups)
