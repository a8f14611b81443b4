"""``fully_shard_optimizer``: checks before the step of a ``torch.optim`` optimizer on sharded parameters."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from megatron.core.distributed.fsdp.buffers.grad_sums import sum_grads
from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup, group_of
from megatron.core.distributed.fsdp.buffers.sharded_grad import set_grads
from megatron.core.distributed.fsdp.runtime.context import FsdpContext

logger = logging.getLogger(__name__)

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)

# Optimizers of torch that do not work element by element, and what they need whole.
_NEEDS_WHOLE = {
    "Adafactor": "rows and columns",
    "LBFGS": "all parameters in one vector",
    "Rprop": "tensors that can be indexed by a mask",
}

Preparation = Callable[[torch.optim.Optimizer, Sequence[FsdpParameterGroup]], None]
_preparations: list[Preparation] = []  # filled when the package is imported, and constant after that


def register_preparation(prepare: Preparation) -> None:
    """Let ``fully_shard_optimizer`` call ``prepare`` with each optimizer and the groups that it trains, in the order of registration.

    Args:
        prepare: makes an optimizer of another library step on sharded parameters, or raises a NotImplementedError with the reason
            why it cannot. It leaves optimizers that it does not know, and prepared ones, as they are.
    """
    _preparations.append(prepare)


def fully_shard_optimizer(optimizer: OptimizerT, *, precision_aware: bool = False) -> OptimizerT:
    """Make an optimizer check gradients before its step, and free them when they are cleared.

    ``torch.optim`` optimizers that work element by element run on sharded parameters, with their state sharded like them (LBFGS,
    Adafactor and Rprop do not). So does ``torch.optim.Muon``: its step brings each matrix to one of the ranks that share it,
    and the result back. This adds:

    - ``step`` raises a RuntimeError in the middle of a forward or backward, after a backward that failed, and after one
      that was not that of the step's last microbatch.
    - Gradients in another dtype than the main weights are cast for the step.
    - ``zero_grad(set_to_none=True)`` frees the main gradients' memory at once.
    - Weights that were gathered before the step are gathered again.
    - ``load_state_dict`` logs a warning if it restored no state from elsewhere.
    - ``FusedAdam`` of apex and of transformer-engine step on what this rank holds; apex's needs this call.
    - Optimizers of bitsandbytes, in 8 bits too, step on the rows that this rank has; they need this call.
    - ``torch.optim.Muon`` steps as on whole matrices, bit for bit where these are multiplied one by one; it needs this call.

    Other libraries may have wrapped ``step`` and ``zero_grad`` before. Call it again after ``add_param_group``.

    Args:
        optimizer: built over parameters of a model *after* ``fully_shard``; changed in place. A ``FlatAdamW`` does all
            this by itself and is returned unchanged.
        precision_aware: the optimizer takes gradients in another dtype than the main weights; they are not cast.

    Returns:
        ``optimizer``.

    Raises:
        ValueError: it holds a parameter from before ``fully_shard``, whose updates no forward would see.
        TypeError: it is no ``torch.optim.Optimizer``.
        NotImplementedError: it is one of those three, and parameters are sharded for it; or a ``FusedAdam`` with settings that
            would do nothing or harm here, or another optimizer of apex.

    Ranks: all that hold the parameters. ``step`` may communicate then: it completes gradients that are summed over
    other ranks of the model (sequence-parallel parameters, tied embeddings).
    Source: ours; FSDP2 leaves these checks to the user.
    """
    if getattr(optimizer, "checks_its_steps", False):
        return optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"fully_shard_optimizer needs a torch.optim.Optimizer, got a {type(optimizer).__name__}; pass the optimizer that it holds"
        )
    groups = groups_of(optimizer)
    _check_works_on_rows(optimizer, groups)
    # Before the hooks: a preparation may replace ``step`` or refuse the optimizer, which must be unchanged then.
    for prepare in _preparations:
        prepare(optimizer, groups)
    # One set of hooks per optimizer: a second call, after add_param_group, only changes what they watch.
    watch = optimizer.__dict__.get(_WATCH)
    if watch is None:
        watch = optimizer.__dict__[_WATCH] = _StepWatch()
        optimizer.register_step_pre_hook(watch.before_step)
        optimizer.register_step_post_hook(watch.after_step)
        optimizer.register_load_state_dict_pre_hook(watch.before_load)
        optimizer.register_load_state_dict_post_hook(watch.after_load)
        _free_when_cleared(optimizer, watch)
    watch.watch(groups, casts=not precision_aware)
    return optimizer


def _check_works_on_rows(optimizer: torch.optim.Optimizer, groups: Sequence[FsdpParameterGroup]) -> None:
    needed = _NEEDS_WHOLE.get(type(optimizer).__name__)
    # By class, not by name alone: another library's optimizer of the same name may work on rows.
    if needed is None or type(optimizer) is not getattr(torch.optim, type(optimizer).__name__, None):
        return
    sharded = [group for group in groups if any(placement.is_shard() for placement in group.placements.optimizer)]
    if sharded:
        raise NotImplementedError(
            f"torch.optim.{type(optimizer).__name__} needs {needed}, got {sharded[0]} in rows that ranks share; use an optimizer that "
            "works element by element (AdamW, SGD), or fully_shard(..., placements='no_shard'), which keeps parameters whole"
        )


# The attribute of an optimizer that holds its watch.
_WATCH = "_fsdp_step_watch"


def _free_when_cleared(optimizer: torch.optim.Optimizer, watch: _StepWatch) -> None:
    """Let ``zero_grad`` free gradients, also one that another library has put into the optimizer."""
    zero_grad: Callable[..., None] | None = optimizer.__dict__.get("zero_grad")
    # A strong reference to the method would be a cycle.
    method = weakref.WeakMethod(optimizer.zero_grad) if zero_grad is None else lambda: zero_grad

    def zero_grad_and_free(*args: Any, **kwargs: Any) -> None:
        own = method()
        assert own is not None
        own(*args, **kwargs)
        for group in watch.groups():
            group.grads.free_main_if_cleared()

    optimizer.zero_grad = zero_grad_and_free  # type: ignore[method-assign]


class _StepWatch:
    """Hooks around a step. It references groups weakly: an optimizer must keep only main weights of a deleted model."""

    def __init__(self) -> None:
        self._loads_itself = False
        self._groups: list[weakref.ref[FsdpParameterGroup]] = []
        self._cast: list[nn.Parameter] = []
        self._replaced: list[tuple[nn.Parameter, torch.Tensor]] = []

    def watch(self, groups: Sequence[FsdpParameterGroup], *, casts: bool) -> None:
        """Watch these groups instead of those before."""
        self._groups = [weakref.ref(group) for group in groups]
        self._cast = [
            parameter
            for group in groups
            if casts and group.training.dtypes.main_grads != group.training.dtypes.main_params
            for parameter in group.sharded
        ]

    def groups(self) -> list[FsdpParameterGroup]:
        return [group for ref in self._groups if (group := ref()) is not None and group.trainable]

    def before_load(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        # ``accelerate`` loads an optimizer's own state_dict(), moved to the device, into each optimizer that it prepares: nothing to
        # warn of. Its floats are the same objects; those of a file are others.
        groups = zip(state_dict["param_groups"], optimizer.param_groups, strict=False)
        self._loads_itself = all(group.get("lr") is own.get("lr") for group, own in groups)

    def after_load(self, optimizer: torch.optim.Optimizer) -> None:
        # DCP fills only the state that it is given, and a new optimizer has none: a resumed run would start again in silence.
        is_stateful = not isinstance(optimizer, torch.optim.SGD) or any(g["momentum"] for g in optimizer.param_groups)
        if is_stateful and not self._loads_itself and not any(optimizer.state.values()):
            logger.warning(
                "the state_dict that %s loaded holds no state: the optimizer starts again. torch.distributed.checkpoint fills only "
                "tensors that it is given, and a new optimizer has none; if the checkpoint has state, load what "
                "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer) returns, or use load_checkpoint",
                type(optimizer).__name__,
            )

    def before_step(self, *_: Any) -> None:
        check_step(self.groups())
        # This runs twice where a step calls its superclass's step: the second time finds cast gradients, and must not note them.
        cast = [(p, p.grad) for p in self._cast if p.grad is not None and p.grad.dtype != p.dtype]
        self._replaced += cast
        set_grads([p for p, _ in cast], [grad.to(p.dtype) for p, grad in cast])

    def after_step(self, *_: Any) -> None:
        # The user's view of gradients is that of before: their dtype, and the memory into which the next backward adds.
        set_grads([p for p, _ in self._replaced], [grad for _, grad in self._replaced])
        self._replaced.clear()
        groups = self.groups()
        for context in contexts_of_groups(groups):
            # Gathered weights are those from before the step: the next forward gathers again.
            context.note_update(groups)
            context.weights_changed()


def contexts_of_groups(groups: Iterable[FsdpParameterGroup]) -> list[FsdpContext]:
    """Return the contexts of the groups, each once, in the order of the groups."""
    found = [group.context() for group in groups if group.context is not None]
    return [context for context in dict.fromkeys(found) if context is not None]


def check_step(groups: Sequence[FsdpParameterGroup]) -> None:
    """Check that the groups' main gradients are complete, and sum those that other ranks of the model share.

    Raises:
        RuntimeError: a forward or backward is running, or has failed, or was not that of the step's last microbatch.

    Ranks: all that hold the groups.
    """
    incomplete: set[FsdpParameterGroup] = set()
    for context in contexts_of_groups(groups):
        context.observer.raise_found()
        incomplete.update(context.grad_reducer.incomplete)
        if context.is_running:
            raise RuntimeError(
                "optimizer.step() must come after forward and backward, got a call in the middle of one, where some "
                "gradients are not reduced yet and weights are in use; call it after backward() has returned"
            )
        if context.state.has_failed:
            raise RuntimeError(
                "optimizer.step() needs the gradients of a whole backward, but the last one did not finish; call "
                "zero_grad() and run forward and backward again"
            )
    # A group whose gradients the user has cleared since takes no part in the step, whatever its last microbatch was.
    given = [group for group in incomplete.intersection(groups) if any(p.grad is not None for p in group.sharded)]
    partial = [group.name_of(0) for group in groups if group.grads.refresh_pending() or group in given]
    if partial:
        raise RuntimeError(
            "optimizer.step() needs gradients reduced over the ranks, but the last microbatch has not come: "
            f"{partial[0]} and {len(partial) - 1} other groups hold sums of earlier ones; run the last backward "
            "under microbatch(model, is_last=True), or outside of no_sync()"
        )
    # Last: a rank that raises above must not leave the others waiting here. The checks see what is the same on all ranks.
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
