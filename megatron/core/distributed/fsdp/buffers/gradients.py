"""The gradients of a parameter group: from backward's first write, through the reduction, to the main gradient."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from functools import cached_property
from itertools import compress, count, repeat
from sys import getrefcount
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Partial

from megatron.core.distributed.fsdp.buffers.flat_buffer import FlatBuffer, FlatStorage
from megatron.core.distributed.fsdp.buffers.grad_sums import GradAccumulator, GradSum
from megatron.core.distributed.fsdp.buffers.param_slots import each
from megatron.core.distributed.fsdp.buffers.sharded_grad import GRAD, PendingGradients, local_gradient, set_grads
from megatron.core.distributed.fsdp.buffers.weights import Weights
from megatron.core.distributed.fsdp.comm.streams import Streams
from megatron.core.distributed.fsdp.comm.transport import MemoryKind
from megatron.core.distributed.fsdp.config.mixed_precision import GroupDtypes, MixedPrecisionPolicy
from megatron.core.distributed.fsdp.dtensor.uneven_dtensor import placed_like


class GradState(Enum):
    """What the engine has put into ``param.grad`` of a group, and the methods of ``Gradients`` that lead there.

    - PENDING: ``_offer_pending``, when a microbatch that is not a step's last one is reduced and its sums wait.
    - FINAL: ``prepare_main``, when the last one is reduced, or any one whose reduction adds to the main gradient; also when a
      norm or an optimizer takes over gradients that the user has put in place (``complete_main``), and when a backward begins
      to write the main gradient (``acquire_main``).
    - NOTHING: ``free_main_if_cleared``, not when the user clears ``param.grad`` but when the engine looks: when the next forward
      begins, or compute has waited for an update that reads the main gradient.
    - NOTHING or FINAL, as before PENDING: ``_withdraw_pending``, which tells them apart by whether the main gradient has memory.

    What scales the main gradient later (clipping, a loss scale) changes no state, and nothing here knows when a step ends.
    """

    NOTHING = "nothing"
    PENDING = "pending gradients: sums over microbatches wait"
    FINAL = "the main gradient"


@dataclass(frozen=True)
class TrainingSettings:
    """How a group is trained, from when its parameters first require gradients.

    Args:
        dtypes: dtypes of the buffers then.
        sum_divisor: what sums of gradients over the ranks are divided by, in total: the number of ranks for a mean, times
            ``EngineOptions.grad_divisor``.
        policy: what the dtypes come from, also where the parameters' dtype is changed later.
        reduced_hook: called with the flat sum of one backward, or of the microbatches before it, on the reduce stream; may
            change it before it is added to the main gradient.
    """

    dtypes: GroupDtypes
    sum_divisor: Fraction
    policy: MixedPrecisionPolicy
    reduced_hook: Callable[[torch.Tensor], None] | None = None


_HOOKS = operator.attrgetter("_post_accumulate_grad_hooks")


class OverwriteFlag:
    """A truth value that is looked up when it is asked for: whether the gradient must overwrite the main gradient.

    transformer-engine takes the attribute in forward and asks whether it is true in backward, after ``get_main_grad``.
    """

    __slots__ = ("_index", "_values")

    def __init__(self, values: Sequence[bool], index: int) -> None:
        self._values, self._index = values, index

    def __bool__(self) -> bool:
        return self._values[self._index]


class GradInput:
    """Where one backward writes whole gradients of this rank: the reduce-scatter input, or the main gradient.

    Attributes:
        storage: memory of the reduce-scatter input, in the communication dtype.
        buffer: the flat buffer over it.
        views: [T] slices of what the latest backward writes, in full shape.
        home: memory in the arena that it has left for now; None while it is there.
        is_acquired: backward may write to ``views``.
        is_main: ``views`` are of the main gradient. [Note: gradients that no other rank shares].
        overwrites: [T] what ``weight.overwrite_main_grad`` is.
    """

    def __init__(self, weights: Weights) -> None:
        layout, axes, dtype = weights.layout, weights.group_mesh.axes, weights.dtypes.grad_comm
        self.storage = FlatStorage(layout.total_numel, dtype, weights.device)
        weights.group_mesh.reserve(layout.total_numel, dtype, weights.device, MemoryKind.REDUCE_SCATTER_INPUT)
        self.buffer = FlatBuffer(layout, [Partial()] * len(axes), axes, self.storage.flat)
        number = len(weights.sharded)
        self._own_views = self.views = [self.buffer.view(index) for index in range(number)]
        self.home: torch.Tensor | None = None
        self.is_acquired = self.is_main = False
        self._written, self._overwrites = [False] * number, [True] * number
        self.overwrites = [OverwriteFlag(self._overwrites, index) for index in range(number)]

    def move(self, flat: torch.Tensor | None, *, home: torch.Tensor | None, copies: bool) -> None:
        """Put it into ``flat`` [total_numel], or into memory of its own if None; ``copies``: what was written moves along."""
        # ``get_main_grad`` has handed out views of the former memory. Where a backward is under way, ``copies`` keeps what it wrote.
        former, self.home = self.storage.flat, home
        self.storage.move(flat)
        self.buffer.rebind(self.storage.flat)
        self._own_views = self.views = [self.buffer.view(index) for index in range(len(self.views))]
        if copies:
            self.storage.flat.copy_(former)

    def acquire(self) -> None:
        """Let backward write to the reduce-scatter input."""
        if not self.storage.in_arena:
            self.storage.allocate()
        self.views, self.is_main, self.is_acquired = self._own_views, False, True

    def acquire_main(self, views: list[torch.Tensor], holds_sum: list[bool]) -> None:
        """Let backward write to these [T] slices of the main gradient, and add where one of them ``holds_sum``."""
        # A sum of earlier microbatches is to later writers what this backward's first gradient is.
        self.views, self.is_main, self.is_acquired, self._written = views, True, True, holds_sum

    def write_target(self, index: int) -> torch.Tensor:
        """Return the slice for parameter ``index``, full shape, to be written or added to."""
        # The first writer of a backward overwrites, since the memory may hold another unit's gradients; later ones add.
        # See [Note: gradients written in place].
        self._overwrites[index] = not self._written[index]
        self._written[index] = True
        return self.views[index]

    def release(self) -> None:
        """Take no more writes, and let the next write to each slice overwrite it; its memory stays until ``storage.free``."""
        self._written, self.is_acquired = [False] * len(self.views), False

    def copy_in(self, grads: Sequence[Any]) -> list[int]:
        """Copy in the [T] gradients that autograd made, and release it.

        Returns:
            The indices of parameters that have no gradient. Their slices are zero.
        """
        # Maps that run in C, since no Python loop may run over parameters. See [Note: the host's budget].
        has_grad, missing = list(map(operator.is_not, grads, repeat(None))), []
        with torch.no_grad():  # as a decorator it costs two more calls
            if True in (first := list(map(operator.gt, has_grad, self._written))):
                torch._foreach_copy_(list(compress(self.views, first)), list(compress(grads, first)))
            # Else each got a gradient in one of the two ways, as most often.
            if True in map(operator.is_, has_grad, self._written):
                if True in (further := list(map(operator.and_, has_grad, self._written))):
                    torch._foreach_add_(list(compress(self.views, further)), list(compress(grads, further)))
                missing = list(compress(count(), map(operator.not_, map(operator.or_, has_grad, self._written))))
                if missing:
                    # Other ranks may have one, and reduce: zeros count on this rank. See [Note: gradients that are missing].
                    torch._foreach_zero_([self.views[index] for index in missing])
        self._written, self.is_acquired = [False] * len(grads), False
        return missing


class MainGradient:
    """The main gradient, and the DTensors over it that ``param.grad`` become. [Note: gradients that are kept].

    Attributes:
        storage: its memory.
        buffer: the flat buffer over it.
        tensors: [T] the DTensors.
        views: [T] this rank's parts, other than in ``tensors``: layers that write them may keep them.
    """

    def __init__(self, weights: Weights) -> None:
        self._sharded = weights.sharded
        self.storage = FlatStorage(weights.main.local.numel(), weights.dtypes.main_grads, weights.device)
        placements, axes = weights.placements.optimizer, weights.group_mesh.axes
        self.buffer = FlatBuffer(weights.layout, placements, axes, self.storage.flat)
        self._make_tensors()
        self.storage.free()

    def _make_tensors(self) -> None:
        self.views = [self.buffer.view(index) for index in range(len(self._sharded))]
        self.tensors = [placed_like(p, self.buffer.view(i)) for i, p in enumerate(self._sharded)]  # type: ignore[arg-type]
        each(setattr, self.tensors, repeat("_fsdp_gradients"), repeat(weakref.ref(self)))  # UnevenDTensor.data asks
        self._referenced = [*self.tensors, *(tensor._local_tensor for tensor in self.tensors)]
        # Counted while nothing is in ``param.grad`` and nobody else can have a reference, so that what comes on top is the user's.
        # A list or closure of the engine that keeps these tensors for longer would look like a user and cost memory in each step.
        self._num_own_references = 0
        self._num_own_references = self.num_foreign_references()

    def num_foreign_references(self) -> int:
        """Count who else references the tensors, of which none is in ``param.grad``, their local parts, and their memory."""
        address = self.storage.flat.untyped_storage()._cdata
        own = self._num_own_references
        # Views share the storage without a reference to the tensors: its use count covers them.
        return sum(map(getrefcount, self._referenced)) + torch._C._storage_Use_Count(address) - own

    def note_views(self, number: int) -> None:
        """Note that the caller keeps so many views of the flat main gradient, as long as that is the same tensor."""
        self._num_own_references += number

    def renew(self) -> None:
        """Reallocate it, with new tensors; the user keeps the old ones with their memory, which count as set by hand."""
        each(setattr, self.tensors, repeat("_fsdp_gradients"), repeat(None))
        self.storage.move(None)
        self.buffer.rebind(self.storage.flat)
        self._make_tensors()


class Gradients:
    """The gradients of a group, none of which takes memory before it is written.

    It knows no names of parameters: it returns what is wrong, and ``FsdpParameterGroup`` raises.

    A backward writes the reduce-scatter input (``input``); its reduction (``accumulator``) writes the main gradient (``main``), of
    which ``param.grad`` are views, or sums over microbatches that wait for the step's last one. If ``is_direct``, backward writes
    the main gradient itself, and nothing is reduced. [Note: gradients that no other rank shares].

    Args:
        weights: the group's, whose parameters get the gradients.
        settings: what sums are divided by, and who sees them.
        sums: sums over further ranks of the model.

    Attributes:
        state: what is in ``param.grad``; set here alone.
        absent: indices of the parameters that got no gradient on this rank since ``param.grad`` was None.
        is_direct: the next backward writes the main gradient.
        has_hooks: a hook was registered on a sharded parameter, ever.
        is_expected: the backward under way will reduce the gradients.
        is_watched: somebody hears when a gradient has arrived.
        reduced: mark of the latest reduction that read the reduce-scatter input, for which compute waits.
        read_by_update: an optimizer update that runs concurrently with compute reads the main gradient, and compute has not waited for it.
    """

    def __init__(self, weights: Weights, settings: TrainingSettings, sums: Sequence[GradSum]) -> None:
        self._sharded, self._unsharded = weights.sharded, weights.unsharded
        self._gradient_of = weights.gradient_of
        self.sums = list(sums)
        self.input = GradInput(weights)
        self.accumulator = GradAccumulator(self.input.buffer, weights.placements, weights.dtypes)
        self.input.storage.free()
        self.use_settings(settings)
        self.main = MainGradient(weights)
        self.state = GradState.NOTHING
        self.absent: list[int] = []
        self.is_expected = self.is_watched = self.read_by_update = False
        self.has_hooks = any(map(_HOOKS, self._sharded))
        # Accumulation nodes are kept alive here: autograd makes another one, without the hook, once nobody refers to it.
        self._nodes: dict[int, Any] = {}
        self.use_streams(Streams())

    @cached_property
    def _pending(self) -> PendingGradients:
        return PendingGradients(self._sharded, self.main.storage.dtype)

    def use_streams(self, streams: Streams) -> None:
        """Be ordered by these streams from now on. Nothing is pending: the former context has waited for it."""
        self.reduced = streams.mark()

    def use_settings(self, settings: TrainingSettings) -> None:
        """Follow these settings from now on, but for their dtypes."""
        self.accumulator.divide_by(settings.sum_divisor)
        self._reduced_hook = settings.reduced_hook
        self.is_direct = self.accumulator.is_alone and settings.sum_divisor == 1 and settings.reduced_hook is None

    def note_hook(self) -> None:
        """Note that a sharded parameter has a hook, which ``call_hooks`` calls."""
        self.has_hooks = True

    def call_hooks(self) -> None:
        """Call the hooks of the parameters that have a gradient, in parameter order. Autograd never accumulates into these."""
        for parameter in self._sharded:
            # A hook may remove itself, or step and clear gradients.
            for hook in list((_HOOKS(parameter) or {}).values()) if parameter.grad is not None else ():
                hook(parameter)

    def train_only(self, requires_grad: Sequence[bool]) -> None:
        """Hand gradients to these of the [T] parameters alone."""
        self._gets_gradient = list(requires_grad)
        # Sums over further ranks of the model need gradients on all of these.
        summed = [id(parameter) for grad_sum in self.sums for parameter in grad_sum.parameters]
        self._may_lack = {i for i, flag in enumerate(requires_grad) if flag and id(self._sharded[i]) not in summed}
        # Parameters that are trained from now on need a hook.
        self.is_watched = False

    # ---- what backward gives ------------------------------------------------------------------------------------

    def watch(self, on_arrival: Callable[..., None]) -> None:
        """Call ``on_arrival`` when all uses of a parameter in one backward are differentiated, also if it was written in place.

        Gradient accumulation remembers the stream on which its node is made, so call it on the first forward's.
        """
        self.is_watched = True
        for index, parameter in enumerate(self._unsharded):
            if parameter.requires_grad and index not in self._nodes:
                self._nodes[index] = torch.autograd.graph.get_gradient_edge(parameter).node
                self._nodes[index].register_hook(on_arrival)

    def expect(self) -> None:
        """Note that the backward under way will reduce the gradients."""
        self.is_expected = True

    def move_input(self, flat: torch.Tensor | None, *, home: torch.Tensor | None = None, copies: bool = False) -> None:
        """Put the reduce-scatter input into ``flat`` [total_numel], or into memory of its own if None.

        Args:
            home: memory in the arena to which it is to come back.
            copies: what was written already moves along.
        """
        self.input.move(flat, home=home, copies=copies)
        self.accumulator.follow(self.input.buffer)

    def acquire_main(self) -> None:
        """Let backward write to the main gradient. Where there is no sum yet, ``param.grad`` is None until ``show_main``."""
        has_sum = self._has_sum()  # first: in the main gradient, zeros are where there is none
        overwrite = self.prepare_main()
        for grad_sum in self.sums:
            grad_sum.before_reduction(overwrite=overwrite)
        # A backward that fails must not leave a gradient where there was none.
        set_grads(compress(self._sharded, map(operator.not_, has_sum)), repeat(None))
        self.input.acquire_main(self.main.views, has_sum)

    def show_main(self) -> None:
        """Let ``param.grad`` be the main gradient."""
        gets = self._gets_gradient
        set_grads(compress(self._sharded, gets), compress(self.main.tensors, gets))

    def copy_in(self) -> None:
        """Copy what autograd left in ``.grad`` to where backward writes; what got no gradient counts as zero."""
        # ``.grad`` of unsharded parameters is emptied at once: it would keep whole gradients until the next backward.
        missing = self.input.copy_in(list(map(self._gradient_of, self._unsharded)))
        set_grads(self._unsharded, repeat(None))
        self.absent, self.is_expected = self._never_given(missing) if missing else missing, False

    def _never_given(self, missing: Sequence[int]) -> list[int]:
        """Return those that got no gradient in this backward, nor in one before that ``param.grad`` or sums hold."""
        has_sum = self._has_sum()
        return [index for index in missing if index in self._may_lack and not has_sum[index]]

    def _has_sum(self) -> list[bool]:
        """Return [T] whether ``param.grad``, or sums that wait, hold a gradient of a parameter."""
        # Before ``_held``: giving up sums changes what is in ``param.grad``.
        waits, held = self.refresh_pending(), self._held()
        found = [True] * len(held) if waits else list(map(operator.is_not, held, repeat(None)))
        for i in self.absent:  # zeros of the engine are no gradient
            found[i] = held[i] is not None and held[i] is not self.main.tensors[i]
        return found

    def remove(self, missing: Sequence[int]) -> None:
        """Set ``param.grad`` of these parameters, which got a gradient on no rank, to None."""
        # One that the user has set in the meantime stays.
        own = [self._sharded[i] for i in missing if self._sharded[i].grad is self.main.tensors[i]]
        set_grads(own, repeat(None))
        self.absent = []

    def drop_unreduced(self) -> None:
        """Drop what a backward that did not finish has written."""
        set_grads(self._unsharded, repeat(None))
        if self.input.is_acquired and self.input.is_main:
            # Sums of earlier microbatches go too: nobody can take its part out of them again.
            held = zip(self.main.tensors, self._sharded, strict=True)
            each(torch.Tensor.zero_, [grad._local_tensor for grad, parameter in held if grad is parameter.grad])
        self.input.release()
        self.is_expected = False

    # ---- sums over microbatches ---------------------------------------------------------------------------------

    def accumulate_partial(self) -> None:
        """Add the reduce-scatter input to this rank's own sum over microbatches."""
        self.prepare_sum()
        self.accumulator.add_input()

    def refresh_pending(self) -> bool:
        """Drop sums over microbatches that the user has given up; return whether others still wait to be reduced over all ranks."""
        if self.state is GradState.PENDING and (given_up := self._pending.given_up()):
            self._drop_sums(given_up)
        return self.state is GradState.PENDING

    @property
    def holds_own_memory(self) -> bool:
        """True if a reduction reads memory outside of the arena that is to be freed then."""
        sums = self.accumulator
        return not self.input.storage.in_arena or (sums.storage is not None and sums.waits_to_be_freed)

    def free_own_memory(self) -> None:
        """Free memory outside of the arena whose gradients have been reduced."""
        self.input.storage.free()
        if self.accumulator.waits_to_be_freed:
            self.accumulator.drop()

    def _offer_pending(self) -> None:
        """Let ``param.grad`` show that sums wait."""
        if self.state is not GradState.PENDING:
            # See [Note: sums that wait].
            set_grads(self._sharded, self._pending.cover())
            self.state = GradState.PENDING

    def _withdraw_pending(self) -> None:
        """Let ``param.grad`` be what it was before sums waited."""
        if self.state is not GradState.PENDING:
            return
        # A gradient of zeros instead of None would apply weight decay.
        zeroed = [index for index in self._pending.zeroed() if index not in self.absent]
        set_grads(self._sharded, self._pending.uncover())
        if zeroed:
            self.main.storage.allocate()
            tensors = [self.main.tensors[index] for index in zeroed]
            torch._foreach_zero_([tensor._local_tensor for tensor in tensors])
            set_grads([self._sharded[index] for index in zeroed], tensors)
        self.state = GradState.FINAL if self.main.storage.allocated else GradState.NOTHING

    def _drop_sums(self, given_up: Sequence[int]) -> None:
        """Drop the sums of these parameters. No reduction is under way."""
        self._withdraw_pending()
        if len(given_up) == len(self._sharded):
            self.drop_partial()
            return
        # Those whose ``param.grad`` is None now are as if they never had a gradient: the step must not decay them.
        self.absent = sorted({*self.absent, *(index for index in given_up if self._sharded[index].grad is None)})
        if self.accumulator.has_sums:
            for index in given_up:
                self.accumulator.view(index).zero_()
        self._offer_pending()

    def drop_partial(self) -> None:
        """Drop sums over microbatches that are not reduced over all ranks. No reduction is under way."""
        self._withdraw_pending()
        self.accumulator.drop()

    # ---- the reduction and the main gradient --------------------------------------------------------------------

    def prepare_sum(self) -> bool:
        """Prepare what a reduction writes that is not a step's last; return True if it holds nothing yet, to be overwritten."""
        storage = self.accumulator.storage
        if storage is None:
            return self.prepare_main()
        # Before memory is allocated: sums that the user has given up must not be added to.
        overwrite = not self.refresh_pending()
        storage.allocate()
        self._offer_pending()
        return overwrite

    def prepare_main(self) -> bool:
        """Make ``param.grad`` the main gradient; return True if it holds nothing yet, to be overwritten."""
        if self.state is not GradState.NOTHING:
            if self.refresh_pending():
                self._withdraw_pending()
            if self.main.storage.allocated:
                self._leave_what_is_kept()
        self.main.storage.allocate()
        held = list(map(GRAD, self._sharded))
        # Freed memory has undefined content, so a gradient that is added to must have been taken over.
        overwrite = all(map(operator.is_, held, repeat(None)))
        if not overwrite:
            self._take_over(held)
        gets = self._gets_gradient
        set_grads(compress(self._sharded, gets), compress(self.main.tensors, gets))
        self.state = GradState.FINAL
        return overwrite

    def _leave_what_is_kept(self) -> None:
        """Take new memory for the main gradient if the user has cleared a part of it and keeps that."""
        former, held = self.main.tensors, list(map(GRAD, self._sharded))
        if not any(map(operator.is_, held, repeat(None))):
            return
        is_own = list(map(operator.is_, held, former))
        held = [None if own else grad for own, grad in zip(is_own, held, strict=True)]
        set_grads(self._sharded, repeat(None))  # references from there would count as the user's
        if self.main.num_foreign_references():
            self.main.renew()
            for new, old in compress(zip(self.main.tensors, former, strict=True), is_own):
                # Gradients that are still in ``param.grad`` go on being summed, in the new memory.
                new._local_tensor.copy_(old._local_tensor)
        triples = zip(is_own, self.main.tensors, held, strict=True)
        set_grads(self._sharded, [main if own else grad for own, main, grad in triples])

    def _take_over(self, held: list[Any]) -> None:
        """Copy into the main gradient what ``param.grad`` held, zeros where there was none."""
        for grad, own in zip(held, self.main.tensors, strict=True):
            if grad is None:
                own._local_tensor.zero_()
            elif grad is not own:
                own._local_tensor.copy_(local_gradient(grad, own))

    def complete_main(self) -> None:
        """Bring the flat main gradient up to date with ``param.grad``; zeros are where there is none, which stays so."""
        none: list[nn.Parameter] = [parameter for parameter in self._sharded if parameter.grad is None]
        self.prepare_main()
        set_grads(none, repeat(None))

    def reduce(self, *, overwrite: bool, is_last: bool, has_input: bool = True) -> None:
        """Write (``overwrite``) or add the scaled sum of the ranks' gradients to the main gradient.

        Args:
            is_last: the main gradient gets the sum of all microbatches; else the accumulator may keep it until then.
            has_input: a backward wrote the reduce-scatter input; else there are only sums of earlier microbatches.

        Ranks: all of the mesh, or (not ``is_last``) of the inner axis.
        """
        if not is_last and self.accumulator.storage is not None:
            self.accumulator.add_input()
            return
        for grad_sum in self.sums:
            # Before the reduction adds to the main gradient: what is there may be summed over further ranks already.
            grad_sum.before_reduction(overwrite=overwrite)
        out = self.main.storage.flat
        # The hook sees what this reduction gives, without what the main gradient held before.
        before = None if overwrite or self._reduced_hook is None else out.clone()
        self.accumulator.finish(out, accumulate=before is None and not overwrite, has_input=has_input)
        if self._reduced_hook is not None:
            self._reduced_hook(out)
            if before is not None:
                out.add_(before)

    def _held(self) -> list[Any]:
        """Return [T] ``param.grad``, or what is beneath pending gradients."""
        return self._pending.held() if self.state is GradState.PENDING else list(map(GRAD, self._sharded))

    @property
    def has_main(self) -> bool:
        """True if the main gradient holds anything."""
        return not all(map(operator.is_, self._held(), repeat(None)))

    def clear(self) -> None:
        """Set every ``param.grad`` to None, and give back the memory of all gradients."""
        set_grads(self._sharded, repeat(None))
        self.free_main_if_cleared()
        self.drop_partial()

    def free_main_if_cleared(self) -> None:
        """Give back the memory of gradients that the user has cleared: the main gradient's, and that of sums that wait."""
        if self.read_by_update or self.input.is_acquired or self.state is GradState.NOTHING:
            return  # the next gather's wait comes after the update that runs concurrently with compute, which reads it
        # ``set_to_none`` of single parameters frees nothing: the others are views of the same memory.
        if set(map(GRAD, self._sharded)) == {None} and not (self.state is GradState.PENDING and self.refresh_pending()):
            if self.main.num_foreign_references():
                self.main.renew()
            self.main.storage.free()
            self.state = GradState.NOTHING

    def keep_for_update(self) -> None:
        """Keep the main gradient, also if it is cleared: an optimizer's update that runs concurrently with compute reads it."""
        self.read_by_update = True

    def release_from_update(self) -> None:
        """Free the main gradient if it was cleared: compute has waited for the update that read it."""
        self.read_by_update = False
        self.free_main_if_cleared()
