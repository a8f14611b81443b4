"""State of a parameter group some of whose parameters are matrices for Muon: momentum of these, AdamW's state of the others."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.dtensor.uneven_dtensor import placed_like
from megatron.core.distributed.fsdp.flat_optimizer.adamw_update import FlatShard, TorchUpdate
from megatron.core.distributed.fsdp.flat_optimizer.flat_runs import Run, merged
from megatron.core.distributed.fsdp.flat_optimizer.flat_state import EXP_AVG, EXP_AVG_SQ, FlatState
from megatron.core.distributed.fsdp.flat_optimizer.muon_update import (
    KernelMuonUpdate,
    RoundPart,
    Stretch,
    Table,
    TorchMuonUpdate,
    VectorRun,
    joined,
)

MOMENTUM = "momentum_buffer"


class MuonState(FlatState):
    """State of a group with matrices for Muon, and of its other parameters, each in one flat buffer without gaps.

    Args:
        param_groups: [T] number of the optimizer's param group of each matrix; None for parameters that AdamW updates.
        work: what is done with elements of matrices.
    """

    def __init__(self, group: FsdpParameterGroup, param_groups: Sequence[int | None], work: TorchMuonUpdate) -> None:
        self.group, self._work = weakref.ref(group), work
        self.remainder = None
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
        self._vector_runs: list[Run] = []
        self._vectors: FlatShard | None = None
        self._vector_table: Table | None = None

    def lay_out(
        self, group: FsdpParameterGroup, table_rows: Sequence[int], only: Sequence[bool], update: TorchUpdate
    ) -> None:
        """Prepare AdamW's updates of tensor ``t``, if ``only[t]``, with the coefficients in row ``table_rows[t]``."""
        vectors = [index for index in self._order if self._param_groups[index] is None and only[index]]
        vectors = [index for index in vectors if self._numels[index]]
        places, begins, numels = self._places, self._begins, self._numels
        runs = tuple(merged(Run(places[i], places[i] + numels[i], table_rows[i]) for i in vectors))
        # What lies side by side both in the main weight and here: their distance is the same.
        spans = merged(Run(begins[i], begins[i] + numels[i], places[i] - begins[i]) for i in vectors)
        self._vector_runs = [Run(begin, end, begin + distance) for begin, end, distance, _ in spans]
        self._vectors = self._vector_table = None
        if vectors and isinstance(self._work, KernelMuonUpdate):
            rows = [VectorRun(begins[i], places[i], table_rows[i], numels[i]) for i in vectors]
            self._vector_table = self._work.table(rows, group.device, places=2)
        elif vectors:
            exp_avg = self._flat[EXP_AVG]
            self._vectors = FlatShard(
                main=torch.zeros_like(exp_avg, dtype=group.weights.main.local.dtype),
                exp_avg=exp_avg,
                exp_avg_sq=self._flat[EXP_AVG_SQ],
                remainder=None,
                model=None,
                runs=runs,
                blocks=update.blocks(runs, group.device),
            )

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
        self,
        group: FsdpParameterGroup,
        model: torch.Tensor | None,
        grad: torch.Tensor,
        coefficients: torch.Tensor,
        update: TorchUpdate,
    ) -> None:
        """Update by AdamW what is no matrix, and cast it to ``model`` unless that is None."""
        main = group.weights.main.local.data
        if self._vector_table is not None:
            assert isinstance(self._work, KernelMuonUpdate)
            state = self._flat[EXP_AVG], self._flat[EXP_AVG_SQ]
            self._work.update_vectors(self._vector_table, main, model, grad, state, coefficients)
        if self._vectors is None:
            return
        # These are few elements: they are brought together and back.
        shard, runs = self._vectors, self._vector_runs
        weights = [main[begin:end] for begin, end, *_ in runs]
        own = [shard.main[place : place + end - begin] for begin, end, place, _ in runs]
        torch._foreach_copy_(own, weights)
        grads = torch.zeros_like(shard.main, dtype=grad.dtype)
        torch._foreach_copy_(
            [grads[place : place + end - begin] for begin, end, place, _ in runs],
            [grad[begin:end] for begin, end, *_ in runs],
        )
        update.update(shard, grads, coefficients)
        torch._foreach_copy_(weights, own)
        if model is not None:
            torch._foreach_copy_([model[begin:end] for begin, end, *_ in runs], own)
