"""``FsdpModule``, the class that ``fully_shard`` adds to a module, and the contexts that roots and ``fully_shard_context`` make."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.utils._pytree
from torch import nn

from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.comm.choose import Fastest
from megatron.core.distributed.fsdp.config.engine_options import EngineOptions
from megatron.core.distributed.fsdp.runtime.context import FsdpContext
from megatron.core.distributed.fsdp.runtime.observer import Observer
from megatron.core.distributed.fsdp.runtime.unit import FsdpUnit, ModuleTree
from megatron.core.module_names import named_modules

# How deep the search for tensors in an output goes in objects: a bound for outputs that hold large or cyclic data structures.
_MAX_DEPTH = 8
# What torch's pytree opens, by class: FSDP2 finds outputs by it. Users register their own classes there.
_TREES = torch.utils._pytree.SUPPORTED_NODES


class FsdpModule(nn.Module if TYPE_CHECKING else object):  # type: ignore[misc]
    """A module whose parameters are sharded. ``fully_shard`` makes it; it has no separate constructor.

    Its parameters are full tensors in forward and backward (and after ``unshard``); otherwise they are DTensors, the
    sharded main weights.
    """

    _fsdp_surface: Surface  # of its class
    _fsdp_unit: FsdpUnit
    # The unit and the context refer to modules weakly, so that deleting a model frees it at once: modules own both.
    _fsdp_tree: ModuleTree
    _fsdp_context: FsdpContext | None = None  # None until the root has run

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a module of the class from before ``fully_shard``: a slice of a sharded container, which calls this, is not sharded."""
        return class_before(cls)(*args, **kwargs)

    def _wrapped_call_impl(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward with unsharded weights. Ranks: all of the mesh, units in the same order."""
        return run_as_forward(self, super().__call__, args, kwargs)

    # As in nn.Module; by this name torch.compile knows what it need not wrap, at the cost of one more graph break.
    __call__ = _wrapped_call_impl

    def _join_unit(self, unit: FsdpUnit, tree: ModuleTree, context: FsdpContext | None) -> None:
        """Take the state of a unit that ``fully_shard`` has made of this module, or of several."""
        self._fsdp_unit, self._fsdp_tree, self._fsdp_context = unit, tree, context

    def _follow_unit(self) -> None:
        """Own the context in which the unit runs now."""
        self._fsdp_context = self._fsdp_unit.context

    @property
    def _fsdp_groups(self) -> tuple[FsdpParameterGroup, ...]:
        """The parameter groups of this unit, without those of nested units; of several modules that are one unit, the first has them."""
        unit = self._fsdp_unit
        return tuple(unit.own_groups) if unit.origin.members[0]() is self else ()

    def _refuse_copies(self, *_: Any) -> NoReturn:
        raise NotImplementedError(self._not_copied())

    # All three: a module's own __deepcopy__ would come before a __reduce_ex__ of ours.
    __copy__ = __deepcopy__ = __reduce_ex__ = _refuse_copies

    def _not_copied(self) -> str:
        return (
            f"{type(self).__name__} must not be copied or pickled: its parameters are views of buffers that ranks share. Copy the "
            "module before fully_shard, or load the state_dict() of this one into another. To save it, pass its state_dict() to "
            "save_checkpoint or torch.distributed.checkpoint. An AveragedModel: make it of the plain module, then call fully_shard on "
            "the modules of both"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Surface:
    """The classes that ``fully_shard`` builds with, and how it finds the fastest transport.

    The defaults are those of the core. Code around it subclasses them to add checks and names of other libraries, and passes
    the subclasses in here, so the core imports none of these names.

    Args:
        module_class: what a unit's module derives from, before its own class.
        observer_class: what a context reports to; ``Observer`` itself checks nothing.
        fastest_transport: chooses for ``transport="auto"``; None: nothing is measured, and the process group moves all.
    """

    module_class: type[FsdpModule] = FsdpModule
    group_class: type[FsdpParameterGroup] = FsdpParameterGroup
    context_class: type[FsdpContext] = FsdpContext
    observer_class: type[Observer] = Observer
    fastest_transport: Fastest | None = None


def run_as_forward(module: FsdpModule, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``call`` with unsharded weights, as a forward of the module's unit. Ranks: all of the mesh, units in the same order."""
    # The module's reference first: the unit's is weak and a property, and this runs for each module of each step.
    unit, context = module._fsdp_unit, module._fsdp_context or find_context(module)
    recomputes = context.enter_forward(unit)
    try:
        # The searches run code of users' containers, which may raise as forward may.
        if unit.order == context.state.first_inside and torch.is_grad_enabled():
            context.watch_inputs(unit, tensors_with_gradients((args, kwargs)))
        output = call(*args, **kwargs)
        watched = tensors_to_watch(output, unit)
    except BaseException:
        # Also KeyboardInterrupt: weights would stay gathered. A recomputation belongs to a backward, which fails as a whole.
        if not recomputes:
            context.fail_forward(unit)
        raise
    (context.leave_recomputation if recomputes else context.leave_forward)(unit, watched)
    return output


# ``__bases__``, not the MRO: the class from before may derive from several itself.
def class_before(cls: type[FsdpModule]) -> type[nn.Module]:
    """Return the class that a module had before ``fully_shard``."""
    own: type[nn.Module] = cls.__bases__[-1]
    return own


def fsdp_modules(root: nn.Module) -> Iterator[FsdpModule]:
    """Return the sharded modules of a tree, ``root`` included, in the order of ``modules()``."""
    return (module for module in root.modules() if isinstance(module, FsdpModule))


def topmost_fsdp_modules(root: nn.Module) -> list[FsdpModule]:
    """Return the sharded modules of a tree that are in no other sharded module."""
    if isinstance(root, FsdpModule):
        return [root]
    return list(dict.fromkeys(found for child in root.children() for found in topmost_fsdp_modules(child)))


def find_context(module: FsdpModule) -> FsdpContext:
    """Return the module's context. If it has none, make one for it and the units inside it: it is the root then."""
    unit = module._fsdp_unit
    if unit.context is None:
        _check_one_root(module)
        groups = (group for inner in fsdp_modules(module) for group in inner._fsdp_groups)
        device, surface = next((group.device for group in groups), torch.device("cpu")), module._fsdp_surface
        # The root's settings become the context's. See ``EngineOptions``.
        made = surface.context_class(device, unit.options, observer_class=surface.observer_class)
        _adopt(module, made)
        _check_ties(module, made)
        made.follow_sync_of_units()
        return made
    context: FsdpContext = unit.context
    return context


def _adopt(root: FsdpModule, context: FsdpContext) -> None:
    """Register the units under ``root`` with ``context``, also those that were a root themselves until now."""
    names: dict[FsdpUnit, list[str]] = {}
    for name, module in named_modules(root):
        if isinstance(module, FsdpModule):
            names.setdefault(module._fsdp_unit, []).append(name)
    for unit, own in names.items():
        # In the tree's order, the same on all ranks: ``register`` numbers units and groups, and plans compare these numbers.
        name = own[0] if len(own) == 1 else f"[{', '.join(own)}]"
        unit.rename(name or class_before(type(root)).__name__, f"{name}." if name else "")
        # A unit that was a root until now gives up its own context; one with a pass under way, or in a shared one, keeps it.
        if unit.context is not None and (unit.context.is_shared or not unit.context.disband()):
            continue
        context.register(unit)
    for module in fsdp_modules(root):
        module._follow_unit()


def _check_one_root(root: FsdpModule) -> None:
    """Refuse a root that holds units of another one, which would lose them.

    Raises:
        RuntimeError: another root, with units that are not in this one, has run with units of this one.
    """
    units = dict.fromkeys(module._fsdp_unit for module in fsdp_modules(root))
    for unit in units:
        if unit.context is None or unit.context.is_shared:
            continue
        others = [other for other in unit.context.units if other not in units]
        if others:
            raise RuntimeError(
                f"units must run under one root, got the unit {unit.name} in {class_before(type(root)).__name__}, which has run in another "
                f"root, with {others[-1].name}; call fully_shard on a module around both roots and run that first, or shard all of "
                "them in one `with fully_shard_context():`"
            )


def _check_ties(root: FsdpModule, context: FsdpContext) -> None:
    # A group runs in one context: another one would gather it on streams that the first does not wait for.
    for unit in context.units:
        for group in unit.borrowed_groups:
            if group.context is None or group.context() is not context:
                raise RuntimeError(
                    f"units that share weights must run under one root, got {unit.name}, which shares {group} with a unit "
                    f"outside of {type(root).__name__}; call fully_shard on a module around both, and run that first"
                )


# The context of the ``fully_shard_context`` around a call; None outside of any.
scope_of_construction: ContextVar[FsdpContext | None] = ContextVar("fully_shard_context", default=None)


@contextmanager
def fully_shard_context(
    device: torch.device | str | None = None, options: EngineOptions | None = None, *, surface: Surface | None = None
) -> Iterator[FsdpContext]:
    """Make the units that ``fully_shard`` makes in this scope share one context, also if they have no common root.

    Args:
        device: the units' device; None: the current CUDA device, or the CPU where there is none.
        options: the settings of the context.
        surface: names its class.

    Yields:
        The context, which ``microbatch`` takes too.

    Ranks: all that shard the units, with the same arguments; does not communicate.
    """
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    surface = surface or Surface()
    context = surface.context_class(
        torch.device(device), options, is_shared=True, observer_class=surface.observer_class
    )
    # A ContextVar: threads and tasks that build other models see no scope, or their own.
    token = scope_of_construction.set(context)
    try:
        yield context
    finally:
        scope_of_construction.reset(token)


@contextmanager
def microbatch(
    module: nn.Module | FsdpContext, is_last: bool = True, *, is_first: bool | None = None
) -> Iterator[None]:
    """Mark forward and backward in this scope as one microbatch of a step.

    Outside of any scope every forward counts as a first and every backward as a last microbatch: right, but slower when
    gradients accumulate. Scopes nest; leaving one restores the former settings, also after an exception.

    Args:
        module: a sharded module, a module that holds some, or the context of a ``fully_shard_context``.
        is_first: True for a step's first microbatch. The optimizer may have written main weights, so the first unshard
            of each group updates the model weights from them; unreduced gradients of earlier microbatches are dropped. False
            for the others, whose weights are those of the first one. None: it is the first one unless unreduced
            gradients wait; right in any case, but where none wait (sharded gradients) each microbatch casts the weights again.
        is_last: True to reduce gradients for the optimizer. False leaves them where ``Placements.gradient`` says:
            unreduced (``Partial``), or reduced over the axes where it is ``Shard(0)``. While unreduced gradients wait,
            ``param.grad`` has no values: it can be cleared, which gives them up, and all else is a RuntimeError.

    Raises:
        ValueError: there is no sharded module in ``module``.

    Ranks: all, with the same arguments; does not communicate.
    Source: ours; FSDP2's ``set_requires_gradient_sync`` and ``set_is_last_backward`` in one scope.
    """
    with ExitStack() as scopes:
        for context in contexts_of(module):
            scopes.enter_context(context.microbatch(is_first=is_first, is_last=is_last))
        yield


def contexts_of(module: nn.Module | FsdpContext) -> list[FsdpContext]:
    """Return the contexts of the topmost sharded modules in a module, each once.

    Raises:
        ValueError: there is no sharded module in it.
    """
    if isinstance(module, FsdpContext):
        return [module]
    contexts = list(dict.fromkeys(find_context(unit) for unit in topmost_fsdp_modules(module)))
    if not contexts:
        raise ValueError(
            f"{type(module).__name__} must hold sharded modules, got none; call fully_shard on its layers first"
        )
    return contexts


def tensors_to_watch(output: Any, unit: FsdpUnit) -> list[torch.Tensor]:
    """Return the tensors of the output of a unit's module whose gradients begin the unit's backward; [] without gradients.

    Raises:
        RuntimeError: the output shares memory with a weight of the unit, which is resharded after its forward.
    """
    if not torch.is_grad_enabled():
        return []
    if type(output) is torch.Tensor and output._base is None:  # the usual output, at the cost of no search
        return [] if output.grad_fn is None else [output]
    found = list(tensors_with_gradients(output))
    leaves = [tensor for tensor in found if tensor.is_leaf]
    if leaves:
        unit.context.refuse_returned_weights(unit, leaves)
    return [tensor for tensor in found if not tensor.is_leaf]


def tensors_with_gradients(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield the tensors of a module's input or output that require gradients, and the tensors that these are views of.

    Args:
        depth: of the search, since it came to an object that is none of those which torch's pytree opens.
    """
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            yield value
            # After an in-place operation on a view, gradients go through its base and not through the view's hooks.
            base = value._base
            if base is not None and base.requires_grad:
                yield base
    elif depth < _MAX_DEPTH:
        for item in items_of(value):
            yield from tensors_with_gradients(item, depth + 1 if depth or type(value) not in _TREES else 0)


def items_of(value: Any) -> Any:
    """Return what an input or output of a module consists of, if it is no tensor."""
    if isinstance(value, list | tuple | set):
        return value
    if isinstance(value, Mapping):
        return value.values()
    if type(value) in _TREES:
        return _TREES[type(value)].flatten_fn(value)[0]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, f.name) for f in dataclasses.fields(value)]
    if isinstance(value, str | bytes | int | float | complex | type(None) | nn.Module | type):
        return ()
    # Any other object: outputs of models are often plain classes, which pytree does not open, and whose gradients would be missed.
    slots = [getattr(cls, "__slots__", ()) for cls in type(value).__mro__]
    names = [name for own in slots for name in ((own,) if isinstance(own, str) else own) if name != "__dict__"]
    own = [getattr(value, name) for name in names if hasattr(value, name)]
    return own + list(vars(value).values()) if hasattr(value, "__dict__") else own
