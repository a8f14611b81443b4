"""The debug mode: ranks compare each collective before it is issued, and name the first gradient or weight that is not finite."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp.buffers.gradients import Gradients
from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.checks.late_reads import DebugCost, explain_late_backwards, watch
from megatron.core.distributed.fsdp.checks.step_order import StepOrder, is_capturing
from megatron.core.distributed.fsdp.comm.process_group import by_value, exchange
from megatron.core.distributed.fsdp.layout.plan import GATHERS, NUM_KINDS, REDUCTIONS, SYNC, UPDATE
from megatron.core.distributed.fsdp.runtime.context import FsdpContext

logger = logging.getLogger(__name__)


class DebugMode:
    """What the debug mode does around collectives and at a step's end. All of it makes the host wait.

    Attributes:
        step: the step that is under way, from 1: backwards of last microbatches since the debug mode was turned on.

    Ranks: all, since they agree on what each of them finds.
    """

    def __init__(self, context: FsdpContext, order: StepOrder) -> None:
        self._context, self._registry, self._device = weakref.ref(context), context.registry, context.device
        self._order = weakref.proxy(order)  # which owns this: a cycle would keep the model's memory after its deletion
        self.step = 1
        self._reduced: dict[int, None] = {}  # groups, in this step, in order
        self._cost = DebugCost()
        self._num_collectives, self._seconds = 0, 0.0
        self._prints_cost = self._may_warn_of_overflow = True
        explain_late_backwards(self._registry)
        self.watch(self._registry.groups)

    def watch(self, groups: Iterable[FsdpParameterGroup]) -> None:
        """Let reads of the groups' weights fail after their unit was left."""
        for group in groups:
            watch(group, self._cost)

    # ---- collectives --------------------------------------------------------------------------------------------

    def issued(self, entry: int) -> None:
        """Count what is about to be issued; compare it with that of other ranks first, and check that what it sends is finite."""
        index, kind = divmod(entry, NUM_KINDS)
        if kind < UPDATE and not is_capturing(self._device):
            begin = time.perf_counter()
            self._check_sent(self._registry.group(index), kind, entry)
            self._seconds += time.perf_counter() - begin
        self._order.entries.append(entry)

    def _check_sent(self, group: FsdpParameterGroup, kind: int, entry: int) -> None:
        context = self._context()
        assert context is not None, "a context issues only while it exists"
        self._num_collectives += 1
        # First: values are compared in collectives along the group's mesh, which ranks must enter for the same group.
        self._order.compare([entry], [group], first=self._num_collectives)
        if kind in (GATHERS[1], SYNC) and group.weights.freshness.version != context.unsharder.state.weight_version:
            # Updates may still be writing main weights on their own stream. See [Note: updates during the forward].
            context.finish_updates()
            main = group.weights.main
            # As they will be computed with: fp16 has no room for all that fp32 has.
            shards = [main.view(i).to(group.dtypes.compute) for i in range(len(group.parameters))]
            self._check(group, "weight", shards, "before its all-gather in forward")
        elif kind in REDUCTIONS:
            self._reduced[group.index] = None
            if kind != REDUCTIONS[-1]:  # sums were looked at before they were summed up
                self._check(group, "gradient", _unreduced(group.grads), "before its reduction")

    def end_backward(self, *, is_last: bool) -> None:
        """Check the gradients of a step that has ended, and log once what the debug mode costs. Compute has waited for them."""
        if is_last and self._reduced and not is_capturing(self._device):
            begin = time.perf_counter()
            # A step may reduce a group twice; its gradient is looked at once, in the order of first reductions, the same on all ranks.
            reduced, self._reduced = self._reduced, {}
            for group in map(self._registry.group, reduced):
                grads = [
                    None if p.grad is None else main._local_tensor
                    for p, main in zip(group.sharded, group.grads.main.tensors, strict=True)
                ]
                self._check(group, "gradient", grads, "after its reduction")
            self.step += 1
            self._seconds += time.perf_counter() - begin
        if self._prints_cost:
            self._prints_cost = False
            self._print_cost()

    def _print_cost(self) -> None:
        storages = [group.weights.full_storage for group in self._registry.groups]
        logger.warning(
            "debug mode: the first step looked at %d operations on weights in %.1f ms, compared %d collectives and checked what they "
            "send in %.1f ms, and each pass fills %.1f MB of weights with NaN",
            self._cost.num_operations,
            self._cost.seconds * 1e3,
            self._num_collectives,
            self._seconds * 1e3,
            sum(storage.nbytes for storage in storages if storage is not None) / 1e6,
        )

    # ---- values that are not finite -----------------------------------------------------------------------------

    def _check(self, group: FsdpParameterGroup, kind: str, tensors: Sequence[torch.Tensor | None], when: str) -> None:
        """Check that these [T] tensors of the group's parameters are finite on all ranks.

        Raises:
            RuntimeError: on all ranks, with the parameter, its unit, the ranks and the step.
        """
        # All ranks take part, whatever they found: a rank that raised by itself would leave the others in a collective.
        with torch.no_grad():
            flags = [torch.zeros((), device=group.device) if t is None else _not_finite(t) for t in tensors]
            numbers = torch.stack(flags)
        axes = [axis for axis in group.group_mesh.mesh.get_all_groups() if axis.size() > 1]
        found = numbers.clone()
        for axis in axes:
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=axis)
        if not found.any():
            return
        # Backward computes the gradient of the last parameter first, as a rule.
        order = range(len(tensors)) if kind == "weight" else reversed(range(len(tensors)))
        of_all = found.tolist()
        bad = [index for index in order if of_all[index]]
        words = {0: "finite", 1: "infinity", 2: "NaN"}
        got = {rank: words[number] for rank, number in exchange(int(numbers[bad[0]]), axes).items() if number}
        others = f" and {len(bad) - 1} more of it" if len(bad) > 1 else ""
        unit = self._registry.owner(group).name
        message = (
            f"{kind}s must be finite, got the first that is not in step {self.step} since the start: {group.name_of(bad[0])} of unit "
            f"{unit}{others}, {when}: {by_value(got)}"
        )
        # Loss scaling in fp16 overflows on purpose: such a step is skipped, and must not end the run.
        if kind == "weight" or torch.float16 not in (group.dtypes.compute, group.dtypes.grad_comm):
            raise RuntimeError(message)
        if self._may_warn_of_overflow:
            self._may_warn_of_overflow = False
            logger.warning("%s; loss scaling in fp16 may mean this to happen, so it is said once and no error", message)


def _unreduced(grads: Gradients) -> list[torch.Tensor]:
    """Return this rank's own gradients [T] in full shape, with its sums that wait, as the next reduction reads them."""
    sums, views = grads.accumulator, grads.input.views
    if not (sums.sums_locally and sums.has_sums):
        return views
    return [sums.view(index) + view for index, view in enumerate(views)]


def _not_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Return 2. if the tensor has a NaN, 1. if it has an infinity, else 0."""
    has_nan, is_finite = tensor.isnan().any(), tensor.isfinite().all()
    return torch.where(has_nan, 2.0, torch.where(is_finite, 0.0, 1.0))
