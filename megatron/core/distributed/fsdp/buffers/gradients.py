"""The gradients of a parameter group: from backward's first write, through the reduction, to the main gradient."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from itertools import compress, repeat
from sys import getrefcount
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial

from megatron.core.distributed.fsdp.buffers.flat_buffer import FlatBuffer
from megatron.core.distributed.fsdp.buffers.grad_accumulator import GradAccumulator, WideGradAccumulator
from megatron.core.distributed.fsdp.buffers.grad_sums import GradSum
from megatron.core.distributed.fsdp.buffers.hsdp_grad_accumulator import HsdpGradAccumulator
from megatron.core.distributed.fsdp.buffers.param_slots import each
from megatron.core.distributed.fsdp.buffers.pending_gradient import PendingGradients
from megatron.core.distributed.fsdp.buffers.storage import FlatStorage
from megatron.core.distributed.fsdp.buffers.weights import Weights
from megatron.core.distributed.fsdp.comm.transport import MemoryKind
from megatron.core.distributed.fsdp.config.mixed_precision import GroupDtypes
from megatron.core.distributed.fsdp.dtensor.uneven_dtensor import placed_like

_GRAD = operator.attrgetter("grad")


class OverwriteFlag:
    """A truth value that is looked up when it is asked for: whether the gradient must overwrite the main gradient.

    transformer-engine takes the attribute in forward and asks whether it is true in backward, after ``get_main_grad``.
    """

    __slots__ = ("holds",)

    def __init__(self) -> None:
        self.holds = True

    def __bool__(self) -> bool:
        return self.holds


class GroupGradients:
    """Flat buffers of a group's gradients, none of which takes memory before it is written.

    A backward writes the reduce-scatter input, whole gradients of this rank alone; its reduction writes the main
    gradient, of which ``param.grad`` are views. Microbatches in between accumulate in ``partial_storage`` (whole gradients,
    where the strategy does not shard them) or in the accumulator (sums over ranks).

    Args:
        weights: the group's, whose parameters get the gradients.
        grad_sums: sums over further ranks of the model.
        scale: what sums over ranks are multiplied by.

    Attributes:
        input_storage: memory of the reduce-scatter input, in the communication dtype.
        input_held: backward may write to the reduce-scatter input.
        input_home: memory in the arena that the reduce-scatter input has left for now; None while it is there.
        main_storage, main_buffer: memory of the main gradient, and the buffer over it.
        overwrites: [T] what ``weight.overwrite_main_grad`` is.
        main: [T] DTensors over the main gradient, which ``param.grad`` become.
        partial_storage: memory of sums over microbatches that are not reduced yet; such sums are as wide as the wider of what
            travels and the main gradients.
        accumulator: what reduces, and holds sums over ranks that are not in the main gradient yet.
        accumulates_partial: microbatches before the last are summed locally, not reduced.
        absent: indices of the parameters that got no gradient on this rank since ``param.grad`` was None.
        is_owed: the backward under way owes the gradient.
        reduced: event of the latest reduction that read the reduce-scatter input; None once nobody need wait for it.
        read_by_update: an optimizer update beside compute reads the main gradient, and compute has not waited for it.
    """

    def __init__(self, weights: Weights, *, grad_sums: Sequence[GradSum], scale: float) -> None:
        self._sharded, self._unsharded = weights.sharded, weights.unsharded
        self._gradient_of = weights.gradient_of
        self._placements, self.scale, self._grad_sums = weights.placements, scale, list(grad_sums)
        layout, axes, dtypes, device = weights.layout, weights.group_mesh.axes, weights.dtypes, weights.device
        self.accumulates_partial = isinstance(self._placements.gradient[-1], Partial)
        self.input_storage = FlatStorage(layout.total_numel, dtypes.grad_comm, device)
        weights.group_mesh.reserve(layout.total_numel, dtypes.grad_comm, device, MemoryKind.REDUCE_SCATTER_INPUT)
        self._input = FlatBuffer(layout, [Partial()] * len(axes), axes, self.input_storage.flat)
        self.accumulator = self._make_accumulator(dtypes)
        self._follow_input()
        self.input_home: torch.Tensor | None = None
        self._written = [False] * len(self._sharded)
        self.overwrites = [OverwriteFlag() for _ in self._sharded]
        self.main_storage = FlatStorage(weights.main.local.numel(), dtypes.main_grads, device)
        self.main_buffer = FlatBuffer(layout, self._placements.optimizer, axes, self.main_storage.flat)
        self.main: list[DTensor] = []
        self._trained_main: list[DTensor] = []
        self._own_references = 0
        self.absent: list[int] = []
        self.partial_storage = FlatStorage(layout.total_numel, dtypes.sums, device)
        self._holds_partial = False
        self._pending: PendingGradients | None = None  # in param.grad now
        self._made_pending: PendingGradients | None = None
        self.input_held = self.is_owed = self.read_by_update = False
        self.reduced: Any = None
        self.reduced_event: Any = None  # the same, kept to be recorded anew

    def _make_accumulator(self, dtypes: GroupDtypes) -> GradAccumulator:
        placements = self._placements.optimizer
        if len(self._input.axes) > 1:
            return HsdpGradAccumulator(self._input, placements, dtypes.sums)
        if dtypes.sums != dtypes.main_grads and not self.accumulates_partial:
            return WideGradAccumulator(self._input, placements, dtypes.sums)
        return GradAccumulator(self._input, placements)

    def set_main_gradients(self, main: list[DTensor]) -> None:
        """Keep the [T] DTensors over ``main_storage``, and give back the memory of all buffers."""
        self._follow_main(main)
        self.train_only([True] * len(main))
        for storage in (self.input_storage, self.main_storage, self.partial_storage):
            storage.free()

    def train_only(self, requires_grad: Sequence[bool]) -> None:
        """Hand gradients to these of the [T] parameters alone."""
        self._trained = [p for p, flag in zip(self._sharded, requires_grad, strict=True) if flag]
        # Sums over further ranks of the model need gradients on all of these.
        summed = [id(parameter) for grad_sum in self._grad_sums for parameter in grad_sum.parameters]
        self._may_lack = {i for i, flag in enumerate(requires_grad) if flag and id(self._sharded[i]) not in summed}
        self._own_references -= len(self._trained_main)
        self._trained_main = [main for main, flag in zip(self.main, requires_grad, strict=True) if flag]
        self._own_references += len(self._trained_main)

    # ---- gradients that the user keeps --------------------------------------------------------------------------

    def _follow_main(self, main: list[DTensor]) -> None:
        """Take [T] DTensors over ``main_storage``, which nobody else references, for the main gradients."""
        each(setattr, self.main, repeat("_fsdp_gradients"), repeat(None))
        each(setattr, main, repeat("_fsdp_gradients"), repeat(weakref.ref(self)))  # UnevenDTensor.data asks
        self.main, self._trained_main = main, []
        self._referenced = [*main, *(grad._local_tensor for grad in main)]
        self._storage_address = self.main_storage.flat.untyped_storage()._cdata
        self._own_references = self._count_references()

    def _count_references(self) -> int:
        """Count who references main gradients (none of which is in ``param.grad``), their local parts, and their memory."""
        return sum(map(getrefcount, self._referenced)) + torch._C._storage_Use_Count(self._storage_address)

    def note_views(self, number: int) -> None:
        """Note that the caller keeps so many views of the flat main gradient, as long as that is the same tensor."""
        self._own_references += number

    def _leave_what_is_kept(self) -> None:
        """Take new memory for the main gradient if the user has cleared a part of it and keeps that."""
        grads = list(map(_GRAD, self._sharded))
        if not any(map(operator.is_, grads, repeat(None))):
            return
        own = [index for index, (grad, main) in enumerate(zip(grads, self.main, strict=True)) if grad is main]
        others = {index: grad for index, grad in enumerate(grads) if grad is not None and index not in own}
        del grads
        each(setattr, self._sharded, repeat("grad"), repeat(None))
        former = self.main
        if self._count_references() != self._own_references:
            self._renew_main()
        for index in own:
            if self.main is not former:
                self.main[index]._local_tensor.copy_(former[index]._local_tensor)
            self._sharded[index].grad = self.main[index]
        for index, grad in others.items():
            self._sharded[index].grad = grad

    def leave_main(self) -> None:
        """Leave all main gradients with their memory to the user, who puts other memory into one: they count as set by hand."""
        grads = list(map(_GRAD, self._sharded))
        each(setattr, self._sharded, repeat("grad"), repeat(None))
        self._renew_main()
        each(setattr, self._sharded, repeat("grad"), grads)

    def _renew_main(self) -> None:
        """Put the main gradient into new memory; what there was is the user's."""
        self.main_storage.move(None)
        self.main_buffer.local = self.main_storage.flat
        trained = {id(main) for main in self._trained_main}
        flags = [id(main) in trained for main in self.main]
        self._follow_main([placed_like(main, self.main_buffer.view(i)) for i, main in enumerate(self.main)])
        self.train_only(flags)

    # ---- the reduce-scatter input -------------------------------------------------------------------------------

    def move_input(self, flat: torch.Tensor | None) -> None:
        """Put the reduce-scatter input into ``flat`` [total_numel], or into memory of its own if None."""
        self.input_home = None
        self.input_storage.move(flat)
        self._input.local = self.input_storage.flat
        self._follow_input()

    def _follow_input(self) -> None:
        """Write and reduce gradients where the reduce-scatter input is now."""
        self._input_views = [self._input.view(i) for i in range(len(self._sharded))]
        self.accumulator.follow(self._input)

    def set_input_aside(self, *, copies: bool) -> None:
        """Move the reduce-scatter input out of the arena until ``bring_input_home``.

        Args:
            copies: what was written already moves along.
        """
        home = self.input_storage.flat
        self.move_input(None)
        self.input_home = home
        if copies:
            self._input.local.copy_(home)

    def bring_input_home(self, *, copies: bool) -> None:
        """Move the reduce-scatter input to where the plan says, which nobody else uses."""
        assert self.input_home is not None
        aside = self._input.local
        self.move_input(self.input_home)
        if copies:
            self._input.local.copy_(aside)

    def write_target(self, index: int) -> torch.Tensor:
        """Return the slice of the reduce-scatter input for parameter ``index``, full shape, to be written or added to."""
        self.overwrites[index].holds = not self._written[index]
        self._written[index] = True
        return self._input_views[index]

    def copy_in(self) -> None:
        """Copy what autograd left in ``.grad`` into the reduce-scatter input; what got no gradient counts as zero."""
        grads = list(map(self._gradient_of, self._unsharded))
        has_grad = list(map(operator.is_not, grads, repeat(None)))
        if True in map(operator.is_, has_grad, self._written):
            self._complete_input(grads)
            return
        if True in has_grad:
            with torch.no_grad():
                torch._foreach_copy_(list(compress(self._input_views, has_grad)), list(compress(grads, has_grad)))
            each(setattr, self._unsharded, repeat("grad"), repeat(None))
        self._written, self.absent = [False] * len(grads), []

    def _complete_input(self, grads: Sequence[Any]) -> None:
        """As ``copy_in``, where some parameters got a gradient both ways, or none."""
        targets, parameters, written, absent = self._input_views, self._unsharded, self._written, []
        given = [index for index, grad in enumerate(grads) if grad is not None]
        added = [index for index in given if written[index]]
        copied = [index for index in given if not written[index]] if added else given
        with torch.no_grad():
            if copied:
                torch._foreach_copy_([targets[i] for i in copied], [grads[i] for i in copied])
            if added:
                torch._foreach_add_([targets[i] for i in added], [grads[i] for i in added])
            if len(copied) + written.count(True) < len(targets):
                missing = [i for i, grad in enumerate(grads) if grad is None and not written[i]]
                torch._foreach_zero_([targets[i] for i in missing])
                absent = self._never_given(missing)
        if given:
            each(setattr, parameters, repeat("grad"), repeat(None))
        self._written, self.absent = [False] * len(targets), absent

    def unreduced(self) -> list[torch.Tensor]:
        """Return this rank's own gradients [T] in full shape, with the sums that wait, as the next reduction reads them."""
        if not self._holds_partial:
            return self._input_views
        return [self._partial.view(index) + view for index, view in enumerate(self._input_views)]

    def _never_given(self, missing: Sequence[int]) -> list[int]:
        """Return those that got no gradient in this backward, nor in one before that ``param.grad`` or sums hold."""
        waits, former = self.has_partial, self.absent
        held = list(map(_GRAD, self._sharded)) if self._pending is None else self._pending.held()
        fresh = [grad is None and not waits for grad in held]
        own = [grad is None or grad is main for grad, main in zip(held, self.main, strict=True)]
        return [i for i in missing if i in self._may_lack and (fresh[i] or (i in former and own[i]))]

    def remove(self, missing: Sequence[int]) -> None:
        """Set ``param.grad`` of these parameters, which got a gradient on no rank, to None."""
        for index in missing:
            if self._sharded[index].grad is self.main[index]:
                self._sharded[index].grad = None
        self.absent = []

    def drop_unreduced(self) -> None:
        """Drop what a backward that did not finish has written."""
        for parameter in self._unsharded:
            parameter.grad = None
        self.is_owed = False
        self._written = [False] * len(self._sharded)

    # ---- sums over microbatches ---------------------------------------------------------------------------------

    def accumulate_partial(self) -> None:
        """Add the reduce-scatter input to this rank's own sum over microbatches."""
        if self.has_partial:
            self.partial_storage.flat.add_(self._input.local)
        else:
            self.partial_storage.allocate()
            self.partial_storage.flat.copy_(self._input.local)
            self._holds_partial = True
        self._offer_pending()

    @property
    def has_partial(self) -> bool:
        """True if sums over microbatches are not reduced over all ranks yet, and the user has not given them up."""
        return self._pending is not None and self._sums_wait(self._pending)

    def _sums_wait(self, pending: PendingGradients) -> bool:
        given_up = pending.given_up()
        if given_up:
            self._drop_sums(given_up)
        return self._pending is not None

    @property
    def holds_own_memory(self) -> bool:
        """True if a reduction reads memory outside of the arena that is to be freed then."""
        waits = self.partial_storage.allocated or not self.input_storage.in_arena
        return waits or (self.accumulator.storage is not None and self.accumulator.waits_to_be_freed)

    def free_own_memory(self) -> None:
        """Free memory outside of the arena whose gradients have been reduced."""
        self.input_storage.free()
        if not self._holds_partial:
            self.partial_storage.free()
        if self.accumulator.waits_to_be_freed:
            self.accumulator.drop()

    @property
    def partial_nbytes(self) -> int:
        """Bytes of sums over microbatches that are not reduced over all ranks, where the strategy keeps them."""
        storage = self.partial_storage if self.accumulates_partial else self.accumulator.storage
        return 0 if storage is None else storage.nbytes

    def _offer_pending(self) -> None:
        """Let ``param.grad`` say that sums wait."""
        if self._pending is None:
            if self._made_pending is None:
                self._made_pending = PendingGradients(self._sharded, self.main_storage.dtype)
            self._pending = self._made_pending
            self._pending.offer()

    def _withdraw_pending(self) -> None:
        """Let ``param.grad`` be what it was before sums waited."""
        if self._pending is None:
            return
        for index in self._pending.withdraw():
            if index not in self.absent:  # a gradient of zeros instead of None would apply weight decay
                self.main_storage.allocate()
                self.main[index]._local_tensor.zero_()
                self._sharded[index].grad = self.main[index]
        self._pending = None

    def _drop_sums(self, given_up: Sequence[int]) -> None:
        """Drop the sums of these parameters. No reduction is under way."""
        self._withdraw_pending()
        if len(given_up) == len(self._sharded):
            self.drop_partial()
            return
        self.absent = sorted({*self.absent, *(index for index in given_up if self._sharded[index].grad is None)})
        for index in given_up:
            if self._holds_partial:
                self._partial.view(index).zero_()
            self.accumulator.zero(index)
        self._offer_pending()

    @property
    def _partial(self) -> FlatBuffer:
        own = self._input
        return FlatBuffer(own.layout, own.placements, own.axes, self.partial_storage.flat)

    def drop_partial(self) -> None:
        """Drop sums over microbatches that are not reduced over all ranks. No reduction is under way."""
        self._withdraw_pending()
        self._holds_partial = False
        self.partial_storage.free()
        self.accumulator.drop()

    # ---- the reduction and the main gradient --------------------------------------------------------------------

    def prepare_sum(self) -> bool:
        """Prepare what a reduction writes that is not a step's last; return True if it holds nothing yet, to be overwritten."""
        storage = self.accumulator.storage
        if storage is None:
            return self.prepare_main()
        overwrite = not self.has_partial
        storage.allocate()
        self._offer_pending()
        return overwrite

    def prepare_main(self) -> bool:
        """Make ``param.grad`` the main gradient; return True if it holds nothing yet, to be overwritten."""
        if self._pending or self.main_storage.allocated:
            self._prepare_again()
        self.main_storage.allocate()
        held = list(map(_GRAD, self._sharded))
        overwrite = all(map(operator.is_, held, repeat(None)))
        if not overwrite:
            self._take_over(held)
        each(setattr, self._trained, repeat("grad"), self._trained_main)
        return overwrite

    def _prepare_again(self) -> None:
        if self.has_partial:
            self._withdraw_pending()
        if self.main_storage.allocated:
            self._leave_what_is_kept()

    def complete_main(self) -> None:
        """Bring the flat main gradient up to date with ``param.grad``; zeros are where there is none, which stays so."""
        none = [parameter for parameter in self._sharded if parameter.grad is None]
        self.prepare_main()
        each(setattr, none, repeat("grad"), repeat(None))

    def _take_over(self, held: list[Any]) -> None:
        """Copy into the main gradient what ``param.grad`` held, zeros where there was none."""
        for grad, own in zip(held, self.main, strict=True):
            if grad is None:
                own._local_tensor.zero_()
            elif grad is not own:
                own._local_tensor.copy_(grad._local_tensor if isinstance(grad, DTensor) else grad)

    def reduce(self, *, overwrite: bool, is_last: bool, has_input: bool = True) -> None:
        """Write (``overwrite``) or add the mean of the ranks' gradients to the main gradient.

        Args:
            is_last: the main gradient gets the sum of all microbatches; else the accumulator may keep it until then.
            has_input: a backward wrote the reduce-scatter input; else there are only sums of earlier microbatches.

        Ranks: all of the mesh, or (not ``is_last``) of the inner axis.
        """
        if self._holds_partial:
            self.partial_storage.flat.add_(self._input.local)
            self._input.local.copy_(self.partial_storage.flat)
            self._holds_partial = False
        if not is_last and self.accumulator.storage is not None:
            self.accumulator.add_input(scale=self.scale)
            return
        for grad_sum in self._grad_sums:
            grad_sum.before_reduction(overwrite=overwrite)
        out = self.main_storage.flat
        self.accumulator.finish(out, scale=self.scale, accumulate=not overwrite, has_input=has_input)

    @property
    def has_main(self) -> bool:
        """True if the main gradient holds anything."""
        held = list(map(_GRAD, self._sharded)) if self._pending is None else self._pending.held()
        return not all(map(operator.is_, held, repeat(None)))

    def clear(self) -> None:
        """Set every ``param.grad`` to None, and give back the memory of all gradients."""
        for parameter in self._sharded:
            parameter.grad = None
        self.free_main_if_cleared()
        self.drop_partial()

    def free_main_if_cleared(self) -> None:
        """Give back the memory of gradients that the user has cleared: the main gradient's, and that of sums that wait."""
        if self.read_by_update or not (self.main_storage.allocated or self._pending):
            return  # the next gather's wait comes after the update beside compute, which reads it
        if set(map(_GRAD, self._sharded)) == {None} and not (self._pending and self.has_partial):
            if self._count_references() != self._own_references:
                self._renew_main()
            self.main_storage.free()

    def end_update(self) -> None:
        """Note that compute has waited for the update that read the main gradient."""
        self.read_by_update = False
        self.free_main_if_cleared()


class HookedGradients(GroupGradients):
    """Gradients of which a function of the user sees what each reduction over all ranks writes.

    Attributes:
        hook: called with the flat sum of one backward, or of the microbatches before it, on the reduce stream; may change it.
    """

    hook: Callable[[torch.Tensor], None]

    def reduce(self, *, overwrite: bool, is_last: bool, has_input: bool = True) -> None:
        """As ``GroupGradients.reduce``, and call the hook before the sum is added to the main gradient."""
        if not is_last and self.accumulator.storage is not None:
            super().reduce(overwrite=overwrite, is_last=is_last, has_input=has_input)
            return
        for grad_sum in self._grad_sums:
            grad_sum.before_reduction(overwrite=overwrite)
        main = self.main_storage.flat
        before = None if overwrite else main.clone()
        super().reduce(overwrite=True, is_last=is_last, has_input=has_input)
        self.hook(main)
        if before is not None:
            main.add_(before)
