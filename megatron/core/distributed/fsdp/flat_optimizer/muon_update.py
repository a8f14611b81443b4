"""Muon's state of a parameter group, and its arithmetic: in torch operations, or in a kernel before and one after the iterations."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, NamedTuple

import torch

from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.config.torch_versions import HAS_TRITON
from megatron.core.distributed.fsdp.dtensor.uneven_dtensor import placed_like
from megatron.core.distributed.fsdp.flat_optimizer.adamw_update import AdamWUpdate, FlatShard
from megatron.core.distributed.fsdp.flat_optimizer.flat_runs import Run, merged
from megatron.core.distributed.fsdp.flat_optimizer.flat_state import EXP_AVG, EXP_AVG_SQ, FlatState

MOMENTUM = "momentum_buffer"


@dataclass(frozen=True)
class Rates:
    """Hyperparameters of a step of Muon."""

    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool


class Stretch(NamedTuple):
    """Elements that lie one behind the other: in the main weight, in the momentum and in what travels, with their scale."""

    main: int
    momentum: int
    travel: int
    numel: int
    scale: float = 1.0


class VectorRun(NamedTuple):
    """Elements that AdamW updates, one behind the other in the main weight and in its state."""

    main: int
    state: int
    table_row: int
    numel: int


class Table(NamedTuple):
    """Blocks of elements for a kernel, in units of ``align`` elements."""

    blocks: torch.Tensor
    align: int
    scales: torch.Tensor | None = None


@dataclass
class RoundPart:
    """What a group has in a round of exchanges, of one param group.

    Args:
        round_number: of the ``Orthogonalizer``.
        param_group: number of the optimizer's param group.
        stretches: this rank's elements.
        scaled: the same, cut where the scale changes.
    """

    round_number: int
    param_group: int
    stretches: list[Stretch]
    scaled: list[Stretch]
    sending: Any = None  # made by MuonUpdate.prepare: a Table
    receiving: Any = None


def joined(stretches: Sequence[Stretch]) -> list[Stretch]:
    """Join stretches, in the order of main weight and momentum, that touch in all three places and have one scale."""
    found: list[Stretch] = []
    for each in stretches:
        last = found[-1] if found else None
        if last is not None and last.scale == each.scale and _end(last) == (each.main, each.momentum, each.travel):
            found[-1] = last._replace(numel=last.numel + each.numel)
        elif each.numel:
            found.append(each)
    return found


def _end(stretch: Stretch) -> tuple[int, int, int]:
    return stretch.main + stretch.numel, stretch.momentum + stretch.numel, stretch.travel + stretch.numel


class MuonUpdate:
    """The work, as one launch each of Triton kernels, or as torch operations.

    Args:
        uses_kernels: Triton can run here.
    """

    def __init__(self, *, uses_kernels: bool) -> None:
        self._kernels: Any = None
        if uses_kernels:
            from megatron.core.distributed.fsdp.flat_optimizer import muon_kernels

            self._kernels = muon_kernels

    def vectors(self, rows: Sequence[VectorRun], only: Sequence[bool], device: torch.device) -> Any:
        """Return what ``update_vectors`` needs to know of all elements that AdamW updates; ``only`` some take part now."""
        active = list(compress(rows, only))
        if self._kernels is not None:
            return self._table(active, device, places=2)
        spans = merged(Run(row.main, row.main + row.numel) for row in rows)
        return spans, tuple(merged(Run(row.state, row.state + row.numel, row.table_row) for row in active))

    def _table(self, rows: Sequence[tuple[int, int, int, int]], device: torch.device, *, places: int = 3) -> Table:
        """Cut rows (some numbers, and last the elements) into blocks. The first ``places`` numbers grow with the elements."""
        align = math.gcd(16, *(number for row in rows for number in (*row[:places], row[3])))
        size = self._kernels.BLOCK_NUMEL
        tables = [torch.empty(0, 4, dtype=torch.int64)]
        for row in rows:
            done = torch.arange(0, row[3], size)
            numbers = [(done + at) // align if place < places else done * 0 + at for place, at in enumerate(row[:3])]
            tables.append(torch.stack([*numbers, (row[3] - done).clamp(max=size) // align], dim=1))
        return Table(torch.cat(tables).int().to(device), align)

    def update_vectors(
        self,
        vectors: Any,
        main: torch.Tensor,
        model: torch.Tensor | None,
        grad: torch.Tensor,
        state: tuple[torch.Tensor, torch.Tensor],
        coefficients: torch.Tensor,
    ) -> None:
        """Update by AdamW what ``vectors`` made of rows, and cast it to ``model``, unless that is None."""
        if self._kernels is not None:
            tensors = (main, main if model is None else model, grad, *state)
            self._launch(self._kernels.vectors_kernel, vectors, tensors, coefficients, model is not None)
            return
        # These are few elements: they are brought together, in the order of the state, and back.
        spans, runs = vectors
        if not runs:
            return
        places = [slice(begin, end) for begin, end, *_ in spans]
        own, grads = (torch.cat([flat[place] for place in places]) for flat in (main, grad))
        shard = FlatShard(own, *state, remainder=None, model=None, runs=runs, blocks=None)
        AdamWUpdate(uses_kernels=False).update(shard, grads, coefficients)
        for target in (main,) if model is None else (main, model):
            pieces = [target[place] for place in places]
            torch._foreach_copy_(pieces, list(own.split([piece.numel() for piece in pieces])))

    def prepare(self, part: RoundPart, device: torch.device) -> None:
        """Make the tables that the kernels need."""
        if self._kernels is None:
            return
        part.sending = self._table([stretch[:4] for stretch in part.stretches], device)
        size = self._kernels.BLOCK_NUMEL
        scales = [torch.full((-(-stretch.numel // size),), stretch.scale) for stretch in part.scaled]
        part.receiving = self._table([stretch[:4] for stretch in part.scaled], device)._replace(
            scales=torch.cat([torch.empty(0), *scales]).to(device)
        )

    def _launch(self, kernel: Any, table: Table, tensors: tuple[torch.Tensor, ...], *arguments: Any) -> None:
        if table.blocks.shape[0]:
            options = {"num_warps": self._kernels.NUM_WARPS, "enable_fp_fusion": False}
            numbers = (*arguments, table.align, self._kernels.BLOCK_NUMEL)
            kernel[(table.blocks.shape[0],)](*tensors, table.blocks, *numbers, **options)

    def accumulate(
        self,
        part: RoundPart,
        rates: Rates,
        grad: torch.Tensor,
        momentum: torch.Tensor,
        sent: torch.Tensor,
        factor: torch.Tensor,
    ) -> None:
        """Add the gradient, times ``factor``, to the momentum, and write what is orthogonalized to ``sent``."""
        if self._kernels is not None:
            numbers = (rates.momentum, 1 - rates.momentum, rates.nesterov)
            self._launch(self._kernels.momentum_kernel, part.sending, (grad, momentum, sent, factor), *numbers)
            return
        for main, place, travel, numel, _ in part.stretches:
            own, gradient = momentum[place : place + numel], grad[main : main + numel]
            gradient = gradient * factor if grad.dtype == torch.float32 else gradient.float().mul_(factor)
            own.lerp_(gradient, 1 - rates.momentum)
            sent[travel : travel + numel].copy_(gradient.lerp_(own, rates.momentum) if rates.nesterov else own)

    def apply(
        self,
        part: RoundPart,
        rates: Rates,
        main: torch.Tensor,
        model: torch.Tensor | None,
        result: torch.Tensor,
        extra_scale: float,
    ) -> None:
        """Decay main weights, subtract from them the scaled result, and cast them to ``model``, unless it is None."""
        if self._kernels is not None:
            numbers = (-rates.weight_decay * rates.lr, -rates.lr, extra_scale, model is not None)
            tensors = (main, main if model is None else model, result)
            self._launch(self._kernels.subtract_kernel, part.receiving, tensors, part.receiving.scales, *numbers)
            return
        for begin, _, travel, numel, scale in part.scaled:
            weight = main[begin : begin + numel]
            w = weight if main.dtype == torch.float32 else weight.float()
            change = result[travel : travel + numel].float().mul_(scale)
            if extra_scale != 1.0:
                change.mul_(extra_scale)
            if rates.weight_decay != 0.0:
                w.add_(w, alpha=-rates.weight_decay * rates.lr)
            w.add_(change, alpha=-rates.lr)
            if w is not weight:
                weight.copy_(w)
            if model is not None:
                model[begin : begin + numel].copy_(w)


def make_muon_update(device: torch.device) -> MuonUpdate:
    """Return the update for shards on the device: by Triton kernels where they can run."""
    can_run = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    return MuonUpdate(uses_kernels=can_run and HAS_TRITON)


class MuonState(FlatState):
    """State of a group with matrices for Muon, and of its other parameters, each in one flat buffer without gaps.

    Args:
        param_groups: [T] number of the optimizer's param group of each matrix; None for parameters that AdamW updates.
        work: what is done with elements of matrices.
    """

    def __init__(self, group: FsdpParameterGroup, param_groups: Sequence[int | None], work: MuonUpdate) -> None:
        self.group, self._work = weakref.ref(group), work
        self.remainder, self._scales, self._read = None, {}, {}
        self._param_groups = list(param_groups)
        # In the order of the layout, which is the same on all ranks, also where this one has no elements.
        self._order = sorted(range(len(param_groups)), key=lambda index: group.layout.slots[index].start)
        mains = [group.weights.main.view(index) for index in range(len(param_groups))]
        self._numels = [view.numel() for view in mains]
        origin = group.weights.main.local.storage_offset()
        self._begins = [int(view.storage_offset() - origin) if view.numel() else 0 for view in mains]
        self._places, sizes = [0] * len(mains), [0, 0]
        for index in self._order:
            is_matrix = param_groups[index] is not None
            self._places[index] = sizes[is_matrix]
            sizes[is_matrix] += self._numels[index]
        keys = (MOMENTUM, EXP_AVG, EXP_AVG_SQ)
        self._flat = {
            key: torch.zeros(sizes[key == MOMENTUM], dtype=torch.float32, device=group.device) for key in keys
        }
        self.views = []
        for index, parameter in enumerate(group.sharded):
            begin, numel, shape = self._places[index], self._numels[index], mains[index].shape
            own = keys[:1] if param_groups[index] is not None else keys[1:]
            self.views.append(
                {key: placed_like(parameter, self._flat[key][begin : begin + numel].view(shape)) for key in own}  # type: ignore[arg-type]
            )
        group.note_state(on_device=sum(flat.numel() * flat.element_size() for flat in self._flat.values()))
        self.momentum = self._flat[MOMENTUM]
        self.parts: list[RoundPart] = []

    def lay_out(
        self, group: FsdpParameterGroup, table_rows: Sequence[int], only: Sequence[bool], update: AdamWUpdate
    ) -> None:
        """Prepare AdamW's updates of tensor ``t``, if ``only[t]``, with the coefficients in row ``table_rows[t]``."""
        vectors = [i for i in self._order if self._param_groups[i] is None and self._numels[i]]
        rows = [VectorRun(self._begins[i], self._places[i], table_rows[i], self._numels[i]) for i in vectors]
        self._vectors = self._work.vectors(rows, [only[i] for i in vectors], group.device)

    def lay_out_matrices(
        self, places: Sequence[tuple[int, int] | None], scaled: Sequence[list[tuple[int, float]]]
    ) -> None:
        """Prepare updates of the matrices that have a place.

        Args:
            places: [T] round of each matrix, and where this rank's elements are in what travels; None for what is not updated.
            scaled: [T] the parts of this rank's elements of each matrix that one scale counts for: elements and scale.
        """
        parts: dict[tuple[int, int], list[Stretch]] = {}
        for index in self._order:
            place, param_group = places[index], self._param_groups[index]
            if place is None or param_group is None:
                continue
            stretches = parts.setdefault((place[0], param_group), [])
            main, momentum, travel = self._begins[index], self._places[index], place[1]
            for numel, scale in scaled[index]:
                stretches.append(Stretch(main, momentum, travel, numel, scale))
                main, momentum, travel = main + numel, momentum + numel, travel + numel
        self.parts = []
        for (round_number, param_group), stretches in parts.items():
            sent = joined([stretch._replace(scale=1.0) for stretch in stretches])
            part = RoundPart(round_number, param_group, sent, joined(stretches))
            self._work.prepare(part, self.momentum.device)
            self.parts.append(part)

    def update_vectors(
        self, group: FsdpParameterGroup, model: torch.Tensor | None, grad: torch.Tensor, coefficients: torch.Tensor
    ) -> None:
        """Update by AdamW what is no matrix, and cast it to ``model`` unless that is None."""
        main, state = group.weights.main.local.data, (self._flat[EXP_AVG], self._flat[EXP_AVG_SQ])
        self._work.update_vectors(self._vectors, main, model, grad, state, coefficients)
