"""Sums of gradients: over microbatches and data-parallel ranks, and over further ranks of the model.

``GradAccumulator`` brings gradients from the reduce-scatter input to the main gradient; it is the only place that scales them.

``GradSum`` is for two kinds of parameters that are the same on ranks which compute with them on different data, other than the
data-parallel ones. ``sequence_parallel`` parameters see a part of the sequence on each tensor-parallel rank; theirs are
summed at the end of a step's last backward. Embeddings are held by the first and the last pipeline stage; theirs are summed when
they are used (norm, clipping, optimizer step, ``finish_grad_sync``), and not before: the last stage's backward ends before the
first stage's begins, which waits for what the last stage sends after it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.placement_types import Placement

from megatron.core.distributed.fsdp.buffers.flat_buffer import FlatBuffer, FlatStorage, Reduction
from megatron.core.distributed.fsdp.config.mixed_precision import GroupDtypes
from megatron.core.distributed.fsdp.config.placement import Placements

_IS_TRAINABLE, _GRAD_SUMS = operator.attrgetter("trainable"), operator.attrgetter("grads.sums")


class GradAccumulator:
    """Reduces the gradients of each microbatch, and keeps sums of those before a step's last one.

    Gradients are first sums of this rank, in the reduce-scatter input. Under hybrid sharding they are then sums over the inner axis, in
    this rank's own segment of that input, which is also what travels over the outer axis. At last they are sums over all
    ranks, in the main gradient. Sums of earlier microbatches wait at one of these three places, in memory of their own:

    - where the strategy does not shard gradients, as sums of this rank;
    - under hybrid sharding, as sums over the inner axis. [Note: two reductions];
    - where they are wider than the main gradient, as sums over all ranks: a bf16 sum of many microbatches would lose what
      they differ by. Else each reduction adds to the main gradient, and nothing waits.

    Args:
        full_input: the reduce-scatter input, partial over all axes.
        placements: where gradients and main gradients rest.
        dtypes: of sums and main gradients.

    Attributes:
        is_alone: no other rank has a summand, and the main gradient can hold sums of microbatches, whatever the strategy is.
        sums_locally: the strategy does not shard gradients: sums of earlier microbatches are sums of this rank.
        storage: memory of sums that wait; None where nothing does.
        has_sums: sums wait.
    """

    def __init__(self, full_input: FlatBuffer, placements: Placements, dtypes: GroupDtypes) -> None:
        self.is_alone = all(axis.size == 1 for axis in full_input.axes) and dtypes.sums == dtypes.main_grads
        self.sums_locally = isinstance(placements.gradient[-1], Partial) and not self.is_alone
        self._final = tuple(placements.optimizer)
        self._after_inner = (Partial(), *self._final[1:]) if len(self._final) > 1 else None
        # Sums are wider than what travels, so they cannot wait in the reduce-scatter input, which the next unit's backward takes.
        self._waiting: tuple[Placement, ...] | None = None  # the placements of sums that wait
        if self.sums_locally:
            self._waiting = full_input.placements
        elif (self._after_inner is not None and not self.is_alone) or dtypes.sums != dtypes.main_grads:
            self._waiting = self._after_inner or self._final
        self.has_sums = False
        self._scale = 1.0
        self.follow(full_input)
        self.storage: FlatStorage | None = None
        if self._waiting is not None:
            numel = full_input.piece(self._waiting).numel()
            self.storage = FlatStorage(numel, dtypes.sums, full_input.local.device)
            self.storage.free()

    def divide_by(self, divisor: Fraction) -> None:
        """Divide sums over all ranks by ``divisor`` from now on: the mean's number of ranks, times what the user asked for."""
        self._scale = float(1 / divisor)

    def follow(self, full_input: FlatBuffer) -> None:
        """Reduce from ``full_input`` where it is now."""
        self._input, last = full_input, full_input
        self._inner: Reduction | None = None
        if self._after_inner is not None:
            self._inner = full_input.reduction(self._after_inner)
            last = self._buffer(self._after_inner, full_input.piece(self._after_inner))
        self._segment, self._last = last.local, last.reduction(self._final)

    def _buffer(self, placements: Sequence[Placement], flat: torch.Tensor) -> FlatBuffer:
        return FlatBuffer(self._input.layout, placements, self._input.axes, flat)

    def add_input(self) -> None:
        """Add the microbatch's gradients to the sums that wait. Ranks: all of the inner axis, unless ``sums_locally``."""
        assert self.storage is not None, "nothing waits: call finish()"
        # Sums that still need a reduction are not scaled: `finish` does it once. Where they are over all ranks already, each
        # microbatch is scaled as it is reduced, and `finish` only copies or adds them. See [Note: two reductions].
        sums, had_sums = self.storage.flat, self.has_sums
        if self.sums_locally:
            (sums.add_ if had_sums else sums.copy_)(self._input.local)
        elif self._inner is not None:
            reduce, full = self._inner
            reduce(sums, full, accumulate=had_sums)  # not scaled yet
        else:
            self.has_sums = False  # else ``finish`` would come back here
            self.finish(sums, accumulate=had_sums, has_input=True)
        self.has_sums = True

    def finish(self, out: torch.Tensor, *, accumulate: bool, has_input: bool) -> None:
        """Write or add the scaled sum over all ranks to ``out``, with the sums of earlier microbatches.

        Args:
            has_input: a backward wrote the reduce-scatter input; else the sums of earlier microbatches are all there is.

        Ranks: all of the mesh.
        """
        if self.has_sums:
            assert self.storage is not None
            if has_input:
                self.add_input()
            self.has_sums = False
            if self._waiting == self._final:
                (out.add_ if accumulate else out.copy_)(self.storage.flat)
                return
            if self.sums_locally:
                self._input.local.copy_(self.storage.flat)
                self.finish(out, accumulate=accumulate, has_input=True)
                return
            # The outer reduction sends this rank's own segment, in the communication dtype; no other rank reads it.
            self._segment.copy_(self.storage.flat)
        elif self._inner is not None:
            reduce, full = self._inner
            reduce(self._segment, full)
        # The only place that scales gradients: once, behind the last reduction, or before it in fp16 (scaled_in_advance).
        reduce, summand = self._last
        reduce(out, summand, scale=self._scale, accumulate=accumulate)

    def view(self, index: int) -> torch.Tensor:
        """Return what the sums that wait hold of parameter ``index`` on this rank."""
        assert self.storage is not None and self._waiting is not None
        return self._buffer(self._waiting, self.storage.flat).view(index)

    @property
    def waits_to_be_freed(self) -> bool:
        """True if there is memory that holds no sum."""
        return self.storage is not None and self.storage.allocated and not self.has_sums

    def drop(self) -> None:
        """Drop the sums and free their memory."""
        self.has_sums = False
        if self.storage is not None:
            self.storage.free()


class GradSum:
    """The main gradients of some parameters of a group, to be summed over a process group.

    Args:
        parameters: sharded, alike on all ranks of the process group.
        over: the process group.
        waits_for_use: sum them when they are used; else at a backward's end.

    Attributes:
        is_due: gradients were reduced that are not summed yet.
        is_summed: the main gradients are sums over all ranks.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], over: ProcessGroup, *, waits_for_use: bool) -> None:
        self.parameters, self.over, self.waits_for_use = list(parameters), over, waits_for_use
        self.is_due = False
        self.is_summed = False

    def before_reduction(self, *, overwrite: bool) -> None:
        """Make the main gradients such that what is reduced into them next can be summed together with what they hold.

        Sums that they hold already are kept on the first rank alone.
        """
        # A sum over ranks is on all of them. Added up again it would count once for each rank.
        if self.is_summed and not overwrite and self.over.rank() > 0:
            grads = self.grads()
            if grads:
                torch._foreach_zero_(grads)
        self.is_summed = False
        self.is_due = True

    def take(self) -> list[torch.Tensor]:
        """Return this rank's parts of the main gradients, which the caller sums over all ranks."""
        self.is_due, self.is_summed = False, True
        return self.grads()

    def grads(self) -> list[torch.Tensor]:
        """Return this rank's parts of the existing main gradients."""
        held = (parameter.grad for parameter in self.parameters)
        return [grad._local_tensor if isinstance(grad, DTensor) else grad for grad in held if grad is not None]


@torch.no_grad()
def sum_grads(groups: Iterable[Any], *, in_use: bool) -> None:
    """Sum the main gradients that are due over the ranks that hold a part of them.

    Args:
        groups: parameter groups.
        in_use: they are about to be used; else a backward ends, and those that wait for use go on waiting.

    Ranks: all that share parameters with this one, alike; one all-reduce for each process group and dtype. On the current
    stream, which has waited for the reductions; does not block the host but for backends that do.
    """
    # In the order of the groups, which ranks of one process group have in common; only they must agree.
    due: dict[tuple[ProcessGroup, torch.dtype], list[torch.Tensor]] = {}
    for grad_sum in chain.from_iterable(map(_GRAD_SUMS, filter(_IS_TRAINABLE, groups))):
        if grad_sum.is_due and (in_use or not grad_sum.waits_for_use):
            for grad in filter(torch.Tensor.numel, grad_sum.take()):
                due.setdefault((grad_sum.over, grad.dtype), []).append(grad)
    for (over, _), grads in due.items():
        # One collective for many small parts. Parts without elements were left out on all of these ranks: they hold the same rows.
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat, group=over)
        parts = flat.split([grad.numel() for grad in grads])
        torch._foreach_copy_(grads, [part.view(grad.shape) for part, grad in zip(parts, grads, strict=True)])
