"""Memory of the engine's buffers on this rank, known before it is used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.layout.flat_layout import padding_by_granule
from megatron.core.distributed.fsdp.layout.plan import Plan

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Bytes of this rank, by kind. Activations, and buffers of the model's own, are not the engine's and not in it.

    Attributes:
        main_weights: what the optimizer updates.
        model_weights: shards (or replicas) of the weights in the compute dtype, as far as they are not the main weights.
        optimizer_state: of an optimizer that told its groups (``FlatAdamW``); 0 until it has.
        host_state: the part of optimizer state, and of fp32 main weights, that is in the host's memory; in no sum.
        unsharded: the arena of unsharded weights.
        reduce_scatter_inputs: the arena of whole gradients that wait for their reduction.
        largest_input: the largest of those that have memory of their own (``least_memory``), one of which is there at a time.
        main_gradients: from a unit's reduction to ``zero_grad``.
        partial_gradients: of strategies that accumulate whole gradients between microbatches, if there are several.
        stays_unsharded: bytes of ``unsharded`` that hold weights from forward to backward to save their second gather.
        saved_traffic: bytes that this rank need not gather in each microbatch because of that.
        padding: elements of padding for each element of a weight, by the granule that they are for. All buffers above have it.
        is_planned: arenas are those of a recorded step; else they are expected, from the order of registration.
    """

    main_weights: int
    model_weights: int
    optimizer_state: int
    host_state: int
    unsharded: int
    reduce_scatter_inputs: int
    largest_input: int
    main_gradients: int
    partial_gradients: int
    stays_unsharded: int
    saved_traffic: int
    padding: Mapping[str, float]
    is_planned: bool

    @property
    def persistent(self) -> int:
        """Bytes that are always there."""
        return self.main_weights + self.model_weights + self.optimizer_state

    @property
    def arena(self) -> int:
        """Bytes of both arenas, which are there from the plan's adoption on."""
        return self.unsharded + self.reduce_scatter_inputs

    @property
    def at_rest(self) -> int:
        """Bytes between steps, gradients cleared."""
        return self.persistent + self.arena

    @property
    def peak(self) -> int:
        """The most at any time of a step of one microbatch."""
        return self.at_rest + self.main_gradients + self.largest_input

    def __str__(self) -> str:
        kept, saved = self.stays_unsharded / _GIB, self.saved_traffic / _GIB
        note = f"{kept:.3f} GiB stays unsharded for backward, which saves {saved:.3f} GiB of gathers" if kept else ""
        of_state = "" if self.optimizer_state or self.host_state else "not known yet"
        rows = [
            ("persistent", self.persistent, ""),
            ("  main weights", self.main_weights, ""),
            ("  model weights", self.model_weights, ""),
            ("  optimizer state", self.optimizer_state, of_state),
            ("arenas", self.arena, "planned" if self.is_planned else "expected from the order of registration"),
            ("  unsharded weights", self.unsharded, note),
            ("  reduce-scatter inputs", self.reduce_scatter_inputs, ""),
            ("one reduce-scatter input", self.largest_input, "outside of the arenas, until its reduction has ended"),
            ("main gradients", self.main_gradients, "from reduction to zero_grad"),
            ("partial gradients", self.partial_gradients, "between microbatches"),
            ("peak, without activations", self.peak, ""),
            ("host: optimizer state", self.host_state, "with main weights in fp32"),
        ]
        shown = [row for row in rows if row[1] or not row[0].startswith(("partial", "  model", "host", "one"))]
        lines = [f"  {name:<28}{nbytes / _GIB:>9.3f} GiB  {note}".rstrip() for name, nbytes, note in shown]
        causes = ", ".join(f"{granule} {share:.2%}" for granule, share in self.padding.items() if share)
        padding = f"  {'padding in these':<28}{sum(self.padding.values()):>9.2%}      {causes}".rstrip()
        return "\n".join(["sharding engine, memory of this rank:", *lines, padding])


def report_memory(groups: Sequence[FsdpParameterGroup], plan: Plan, *, is_planned: bool) -> MemoryReport:
    """Compute the memory of these groups under a plan, without allocation or communication."""
    trainable = [group for group in groups if group.trainable]
    own_inputs = [g.grads.input.storage.nbytes for g in trainable if g.least_memory and not g.grads.is_direct]
    stays = [group.weights for group in groups if group.index in plan.stays_unsharded_nbytes]
    return MemoryReport(
        main_weights=sum(group.weights.main.local_nbytes for group in groups),
        model_weights=sum(_model_nbytes(group) for group in groups),
        optimizer_state=sum(group.state_nbytes.on_device for group in groups),
        host_state=sum(group.state_nbytes.on_host for group in groups),
        unsharded=plan.weights.nbytes,
        reduce_scatter_inputs=plan.inputs.nbytes,
        largest_input=max(own_inputs, default=0),
        main_gradients=sum(group.grads.main.storage.nbytes for group in trainable),
        partial_gradients=sum(sums.nbytes for g in trainable if (sums := g.grads.accumulator.storage) is not None),
        stays_unsharded=sum(plan.stays_unsharded_nbytes.values()),
        # What their gathers would bring from other ranks.
        saved_traffic=sum((w.full.local.numel() - w.model.local.numel()) * w.rest_dtype.itemsize for w in stays),
        padding=_padding(groups),
        is_planned=is_planned,
    )


def _padding(groups: Sequence[FsdpParameterGroup]) -> dict[str, float]:
    numels: Counter[str] = Counter()
    for group in groups:
        numels.update(padding_by_granule(group.layout))
    used = sum(group.layout.used_numel for group in groups)
    return {granule: numel / max(used, 1) for granule, numel in numels.items()}


def _model_nbytes(group: FsdpParameterGroup) -> int:
    """Bytes of the model weight besides the main weight, which may be all of it, or lie in it."""
    shared = group.weights.main.local_nbytes if group.weights.encoded_piece is None else 0
    return group.weights.model.local_nbytes - shared
