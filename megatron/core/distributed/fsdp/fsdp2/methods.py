"""Methods of PyTorch's ``FSDPModule``, by the same names: each does the same, logs once how the hint is followed, or raises.

``docs/fsdp2.md`` has the table of all of them, which a test makes from PyTorch's own class.
"""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem

from megatron.core.distributed.fsdp.api.module import FsdpModule, find_context
from megatron.core.distributed.fsdp.compat.module import MegatronModule
from megatron.core.distributed.fsdp.runtime.context import FsdpContext
from megatron.core.distributed.fsdp.runtime.unit import FsdpUnit

logger = logging.getLogger(__name__)


class Fsdp2ValueError(ValueError, AssertionError):
    """An argument that must be another one; an ``AssertionError`` in FSDP2, whose callers may catch that."""


class Fsdp2NotServedError(NotImplementedError, AssertionError):
    """A reasonable wish that is not supported; an ``AssertionError`` in FSDP2."""


class _OutsideOfGraphs:
    """A value that is true, except while ``torch.compile`` traces."""

    def __bool__(self) -> bool:
        return torch._guards.TracingContext.try_get() is None


# transformers reads ``_is_fsdp_managed_module``: generate() then runs until all ranks are done, and LayerDrop skips no layer on one
# rank only. torch.compile reads it too, and would then guard no attribute of the module, or not compile it.
SHARDED = _OutsideOfGraphs()


class UnshardHandle:
    """What ``unshard(async_op=True)`` returns."""

    def __init__(self, context: FsdpContext, unit: FsdpUnit) -> None:
        self._context, self._unit = context, unit

    def wait(self) -> None:
        """Let compute use the weights, and put them into the modules, unless a forward has done so since."""
        self._context.wait_for_unshard(self._unit)


class FSDPModule(MegatronModule, FsdpModule):
    """A sharded module with the methods that users of FSDP2 call. Ranks: all of the mesh, with the same arguments, unless stated otherwise."""

    _is_fsdp_managed_module = SHARDED

    # ---- weights ------------------------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the unit's weights and put them into its modules, without nested units.

        They stay there until ``reshard``, or until the unit's next forward or backward has been left, as in FSDP2; at the
        latest until a step's last backward ends or an optimizer of this library steps. What is written to them is lost then:
        write to the sharded parameters.

        Args:
            async_op: begin the all-gather, and return a handle whose ``wait`` does the rest; the unit's forward does so, too.

        Ranks: all of the mesh; does not block the host.
        """
        context = find_context(self)
        context.unshard(self._fsdp_unit.groups, waits=not async_op)
        return UnshardHandle(context, self._fsdp_unit) if async_op else None

    def reshard(self) -> None:
        """Switch the unit back to its sharded parameters, unless a forward or backward is using the weights."""
        find_context(self).reshard(self._fsdp_unit.groups)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Keep weights from forward to backward (False), or gather them again for backward (True), from the next step on.

        Where ``fully_shard(reshard_after_forward=False)`` lets weights rest whole, they go on to do so. Modules show sharded
        parameters in between in any case.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}")
        for unit in _units(self, recurse):
            unit.change_options(keeps_weights=not reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Take FSDP2's hint for microbatches: weights are resharded after each backward, and prefetched for the next forward."""
        if not reshard_after_backward:
            say_once(
                "set_reshard_after_backward(False)",
                "the plan prefetches the next microbatch's weights; set_reshard_after_forward(False) keeps them throughout a step",
            )

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Take FSDP2's hint that backward needs no weights of this unit: they are gathered all the same."""
        if not unshard_in_backward:
            say_once("set_unshard_in_backward(False)", "weights are gathered for backward as for any unit")

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Prefetch as many units as are listed when this unit's forward begins: those that the recorded order has next."""
        self._prefetch_so_many("forward_prefetch_depth", modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """As ``set_modules_to_forward_prefetch``, when this unit's backward begins."""
        self._prefetch_so_many("backward_prefetch_depth", modules)

    def _prefetch_so_many(self, name: str, modules: Sequence[nn.Module]) -> None:
        for module in modules:
            if not isinstance(module, FSDPModule):
                raise ValueError(f"Expects FSDPModule but got {type(module)}: {module}")
        depth = len({module._fsdp_unit for module in modules}) or None
        self._fsdp_unit.change_options(**{name: depth})

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Take FSDP2's wish for all-gathers that the host does not wait for, private there, which some callers have: they all are."""

    def set_post_optim_event(self, event: Any) -> None:
        """Let the next forward's all-gathers wait for this event, in addition to the work queued on the compute stream; None: for nothing more."""
        if event is not None:
            event.wait()

    # ---- gradients ----------------------------------------------------------------------------------------------

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether backwards from now on end a step (True), as ``microbatch(is_last=)`` does for a scope.

        Where gradients are sharded they are reduced in each microbatch, whatever is set here, and added up in the main
        gradients' dtype. If only a part of the model is set to False, it is reduced with the rest.
        """
        for unit in _units(self, recurse):
            unit.sync_gradients(bool(requires_gradient_sync), all_reduces=bool(requires_gradient_sync))
        self._follow_sync(recurse)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Under HSDP, set whether backwards from now on reduce over the outer axis too (True) or only over the inner one."""
        for unit in _units(self, recurse):
            has_one_axis = all(len(group.group_mesh.axes) < 2 for group in unit.own_groups)
            unit.sync_gradients(unit.settings.syncs_gradients, all_reduces=bool(requires_all_reduce) or has_one_axis)
        self._follow_sync(recurse)

    def _follow_sync(self, recurse: bool) -> None:
        """Apply the setting in all contexts: a unit that was added after this module had run has a separate one."""
        for context in dict.fromkeys(unit.context for unit in _units(self, recurse)):
            if context is not None:
                context.follow_sync_of_units()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Do nothing: gradients are complete when a backward returns, on the stream that called it."""

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of the ranks' gradients of this unit by ``factor``, instead of the number of ranks."""
        if not factor > 0:
            raise ValueError(f"the factor by which gradients are divided must be positive, got {factor}")
        for group in self._fsdp_unit.own_groups:
            group.change_training(sum_divisor=Fraction(factor))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Do what ``set_gradient_divide_factor`` does, under the name that FSDP2 had before."""
        self.set_gradient_divide_factor(factor)

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: torch.Stream | None = None) -> None:
        """Call ``hook`` with the flat reduced gradients of each buffer of the unit, before they are added to ``param.grad``.

        Args:
            hook: changes them in place, such as a reduction over further ranks; runs on the reduce stream.
            stream: where to run it instead; not with HSDP.

        Raises:
            ValueError: ``stream`` is given for a mesh of two axes.
        """
        for group in self._fsdp_unit.own_groups:
            if stream is not None and len(group.group_mesh.axes) > 1:
                raise ValueError("stream cannot be set when using native HSDP")
            group.change_training(reduced_hook=hook if stream is None else _on_stream(hook, stream))

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Do nothing: reductions are sums that are scaled afterwards, for fp16 before."""

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Do nothing: gradients that a rank lacks count as zero where another rank has them."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Take FSDP2's dial for memory: the plan decides how many inputs of reductions there are room for."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")
        if max_input_buffers > 1:
            say_once(f"set_reduce_scatter_max_input_buffers({max_input_buffers})", "the plan lays these buffers out")

    # ---- the rest -----------------------------------------------------------------------------------------------

    def reset_iter_state(self) -> None:
        """Drop a pass that an exception ended, with sums that wait for a last microbatch. Without it, the next forward does.

        Raises:
            RuntimeError: the module is in another sharded module.
        """
        context = find_context(self)
        if self._fsdp_unit.prefix and not context.is_shared:
            raise RuntimeError(
                f"reset_iter_state must be called on the root, got {self._fsdp_unit.name}; call it on the module around"
            )
        context.abandon()

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> None:
        """Refuse ``DistributedDataParallel``, whose constructor asks for this first."""
        raise TypeError(
            f"DistributedDataParallel must get a module with whole parameters, got a {type(self).__name__}, whose gradients "
            "fully_shard averages over the ranks itself; leave DistributedDataParallel out, and shard over a mesh of two axes "
            "(HSDP) for replicas"
        )

    def __deepcopy__(self, memo: Any) -> Any:
        raise Fsdp2NotServedError(f"FSDP does not support deepcopy: {self._not_copied()}")

    def set_custom_all_gather(self, comm: object) -> NoReturn:
        """Refuse another all-gather."""
        raise NotImplementedError(
            "set_custom_all_gather is not served: transports know the engine's arena; choose one by fully_shard(..., transport=), "
            "or write one (CONTRIBUTING.md, How to add a transport)"
        )

    def set_custom_reduce_scatter(self, comm: object) -> NoReturn:
        """Refuse another reduce-scatter."""
        raise NotImplementedError(
            "set_custom_reduce_scatter is not served: transports know the engine's arena; choose one by "
            "fully_shard(..., transport=), or write one (CONTRIBUTING.md, How to add a transport)"
        )

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Refuse True: memory comes from the transport."""
        if enable:
            raise NotImplementedError(
                'set_allocate_memory_from_process_group_for_comm(True) is not served; pass fully_shard(..., transport="symm")'
            )

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> NoReturn:
        """Refuse: memory is registered when a module is sharded."""
        raise NotImplementedError('set_symm_mem_for_comm is not served; pass fully_shard(..., transport="symm")')

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Refuse True: the process groups are fixed when a module is sharded."""
        if enable:
            raise NotImplementedError(
                "set_separate_reduce_scatter_group(True) is not served; pass fully_shard(..., fsdp_group_ag=) a process group of "
                "the same ranks, which all-gathers then use while reductions run"
            )


def share_comm_ctx(modules: Sequence[nn.Module]) -> None:
    """Let roots, such as the stages of a pipeline, use one set of streams. No pass of any is under way.

    Raises:
        ValueError: one of them is not sharded.
    """
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expects list of FSDPModules but got {module}")
    contexts = [find_context(module) for module in modules if isinstance(module, FSDPModule)]
    for context in contexts[1:]:
        context.streams.share(contexts[0].streams)


def mark_as_composed(modules: Sequence[nn.Module]) -> None:
    """Let PyTorch's ``replicate`` skip the modules, as it skips those that FSDP2 has sharded."""
    for module in modules:
        module.__dict__.setdefault(REGISTRY_KEY, OrderedDict())["fully_shard"] = RegistryItem()


def _units(module: Any, recurse: bool) -> Iterator[FsdpUnit]:
    modules = module.modules() if recurse else (module,)
    return (unit for unit in dict.fromkeys(m._fsdp_unit for m in modules if isinstance(m, FsdpModule)))


def _on_stream(hook: Callable[[torch.Tensor], None], stream: Any) -> Callable[[torch.Tensor], None]:
    def run(reduced: torch.Tensor) -> None:
        current = torch.cuda.current_stream(reduced.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            hook(reduced)
        current.wait_stream(stream)

    return run


@functools.cache
def say_once(call: str, instead: str) -> None:
    """Log that a hint about memory or time is followed in another way; it changes no numbers."""
    logger.warning("%s changes no numbers, and is followed in another way: %s", call, instead)
