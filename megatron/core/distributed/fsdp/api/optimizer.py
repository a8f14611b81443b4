"""``fully_shard_optimizer``: checks before the step of a ``torch.optim`` optimizer on sharded parameters."""

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
    """Make an optimizer check gradients before its step, and free them when they are cleared.

    Any ``torch.optim`` optimizer works on sharded parameters, and its state is sharded like them. This adds:

    - ``step`` raises a RuntimeError in the middle of a forward or backward, after a backward that failed, and after one
    that
      was not that of the step's last microbatch.
    - Gradients in another dtype than the main weights are cast for the step.
    - ``zero_grad(set_to_none=True)`` frees the main gradients' memory at once.
    - Weights that were gathered before the step are gathered again.

    Args:
        optimizer: built over parameters of a model *after* ``fully_shard``; changed in place. A ``FlatAdamW`` does all
            this by itself and is returned unchanged.

    Returns:
        ``optimizer``.

    Raises:
        ValueError: it holds a parameter from before ``fully_shard``, whose updates no forward would see.

    Ranks: all that hold the parameters. ``step`` may communicate then: it completes gradients that are summed over
    other ranks of the model (sequence-parallel parameters, tied embeddings).
    Source: ours; FSDP2 leaves these checks to the user.
    """
    if getattr(optimizer, "checks_its_steps", False):
        return optimizer
    groups = groups_of(optimizer)
    watch = _StepWatch(groups)
    optimizer.register_step_pre_hook(watch.before_step)
    optimizer.register_step_post_hook(watch.after_step)
    zero_grad = weakref.WeakMethod(optimizer.zero_grad)  # a strong reference would be a cycle

    def zero_grad_and_free(set_to_none: bool = True) -> None:
        own = zero_grad()
        assert own is not None
        own(set_to_none=set_to_none)
        for group in watch.groups():
            group.grads.free_main_if_cleared()

    optimizer.zero_grad = zero_grad_and_free  # type: ignore[method-assign]
    return optimizer


class _StepWatch:
    """Hooks around a step. It references groups weakly: an optimizer must keep only main weights of a deleted model."""

    def __init__(self, groups: list[FsdpParameterGroup]) -> None:
        self._groups = [weakref.ref(group) for group in groups]
        self._cast = [
            parameter
            for group in groups
            if group.trained_dtypes.main_grads != group.trained_dtypes.main_params
            for parameter in group.sharded
        ]
        self._replaced: list[tuple[nn.Parameter, torch.Tensor]] = []

    def groups(self) -> list[FsdpParameterGroup]:
        return [group for ref in self._groups if (group := ref()) is not None and group.trainable]

    def before_step(self, *_: Any) -> None:
        check_step(self.groups())
        for parameter in self._cast:
            # Twice for a step that calls its superclass's step.
            if parameter.grad is not None and parameter.grad.dtype != parameter.dtype:
                self._replaced.append((parameter, parameter.grad))
                parameter.grad = parameter.grad.to(parameter.dtype)

    def after_step(self, *_: Any) -> None:
        for parameter, grad in self._replaced:
            parameter.grad = grad
        self._replaced.clear()
        for context in contexts_of_groups(self.groups()):
            context.weights_changed()


def contexts_of_groups(groups: Iterable[FsdpParameterGroup]) -> list[FsdpContext]:
    """Return the contexts of the groups, each once, in the order of the groups."""
    found = (group.context() for group in groups if group.context is not None)
    return list(dict.fromkeys(context for context in found if context is not None))


def check_step(groups: Sequence[FsdpParameterGroup]) -> None:
    """Check that the groups' main gradients are complete, and sum those that other ranks of the model share.

    Raises:
        RuntimeError: a forward or backward is running, or has failed, or was not that of the step's last microbatch.

    Ranks: all that hold the groups.
    """
    for context in contexts_of_groups(groups):
        if context.is_running:
            raise RuntimeError(
                "optimizer.step() must come after forward and backward, got a call in the middle of one, where some "
                "gradients are not reduced yet and weights are in use; call it after backward() has returned"
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
    """Return the groups of the optimizer's parameters, each once, also frozen ones; parameters without a group are ignored.

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
            groups[group] = None
    return list(groups)
