"""State of a parameter group some of whose parameters are matrices for Muon: momentum of these, AdamW's state of the others."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.dtensor.local_parts import placed_like
from megatron.core.distributed.fsdp.flat_optimizer.adamw_update import FlatShard, TorchUpdate
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


@dataclass
class _Part:
    """Matrices of one param group: places of this rank's elements in main weight and momentum, and the parts of one scale.

    Args:
        param_group: number of the optimizer's param group.
        numbers: of the matrices, in the order of their elements.
        runs: [(begin in the main weight, begin in the momentum, elements of each matrix)], one for each run of elements.
        scaled: [(begin in the main weight, elements, scale)] of what one scale counts for.
    """

    param_group: int
    numbers: list[int] = field(default_factory=list)
    runs: list[tuple[int, int, list[int]]] = field(default_factory=list)
    scaled: list[tuple[int, int, float]] = field(default_factory=list)


class MuonState(FlatState):
    """State of a group with matrices for Muon, and of its other parameters, each in one flat buffer without gaps.

    Args:
        param_groups: [T] number of the optimizer's param group of each matrix; None for parameters that AdamW updates.
    """

    def __init__(self, group: FsdpParameterGroup, param_groups: Sequence[int | None]) -> None:
        self.group = weakref.ref(group)
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
        group.optimizer_state_nbytes = sum(flat.numel() * flat.element_size() for flat in self._flat.values())
        self.parts: list[_Part] = []
        self._vector_runs: list[Run] = []
        self._vectors: FlatShard | None = None
        self._weights: list[list[torch.Tensor]] = []
        self._address = 0

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
        self._vectors = None
        if vectors:
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

    def lay_out_matrices(self, numbers: Sequence[int | None], scaled: Sequence[list[tuple[int, float]]]) -> None:
        """Prepare updates of the matrices that have a number.

        Args:
            numbers: [T] of each matrix in the ``Orthogonalizer``; None for what is not updated.
            scaled: [T] the parts of this rank's elements of each matrix that one scale counts for, with the scale.
        """
        parts: dict[int, _Part] = {}
        for index in self._order:
            number, param_group = numbers[index], self._param_groups[index]
            if number is None or param_group is None:
                continue
            part = parts.setdefault(param_group, _Part(param_group))
            part.numbers.append(number)
            begin, place, numel = self._begins[index], self._places[index], self._numels[index]
            last = part.runs[-1] if part.runs else None
            joins = last is not None and (
                not numel or (last[0] + sum(last[2]), last[1] + sum(last[2])) == (begin, place)
            )
            if last is not None and joins:
                last[2].append(numel)
            else:
                part.runs.append((begin, place, [numel]))
            for count, scale in scaled[index]:
                part.scaled.append((begin, count, scale))
                begin += count
        self.parts = list(parts.values())
        self._address = 0

    def update_vectors(
        self, group: FsdpParameterGroup, grad: torch.Tensor, coefficients: torch.Tensor, update: TorchUpdate
    ) -> None:
        """Update by AdamW what is no matrix. These are few elements: they are brought together and back."""
        if self._vectors is None:
            return
        main, shard = group.weights.main.local.data, self._vectors
        weights = [main[begin:end] for begin, end, *_ in self._vector_runs]
        own = [shard.main[place : place + end - begin] for begin, end, place, _ in self._vector_runs]
        torch._foreach_copy_(own, weights)
        grads = torch.zeros_like(shard.main, dtype=grad.dtype)
        torch._foreach_copy_(
            [grads[place : place + end - begin] for begin, end, place, _ in self._vector_runs],
            [grad[begin:end] for begin, end, *_ in self._vector_runs],
        )
        update.update(shard, grads, coefficients)
        torch._foreach_copy_(weights, own)

    def accumulate(
        self, part: _Part, rates: Rates, grad: torch.Tensor, factor: torch.Tensor
    ) -> dict[int, torch.Tensor]:
        """Add the gradient, times ``factor``, to the momentum; return what is orthogonalized of each matrix, flat, by number."""
        pieces: list[torch.Tensor] = []
        for begin, place, numels in part.runs:
            length = sum(numels)
            momentum = self._flat[MOMENTUM][place : place + length]
            gradient = grad[begin : begin + length]
            gradient = gradient * factor if grad.dtype == torch.float32 else gradient.float().mul_(factor)
            momentum.lerp_(gradient, 1 - rates.momentum)
            pieces += (gradient.lerp_(momentum, rates.momentum) if rates.nesterov else momentum).split(numels)
        return dict(zip(part.numbers, pieces, strict=True))

    def apply(
        self,
        group: FsdpParameterGroup,
        part: _Part,
        rates: Rates,
        orthogonal: Sequence[torch.Tensor],
        extra_scale: float,
    ) -> None:
        """Decay this rank's elements of the matrices, and subtract from them the scaled orthogonal matrices [numbers]."""
        if not part.scaled:
            return
        weights = self._weights_of(group)[self.parts.index(part)]
        main = weights if weights[0].dtype == torch.float32 else [weight.float() for weight in weights]
        change = torch.cat(list(orthogonal)).float()
        changes = list(change.split([numel for _, numel, _ in part.scaled]))
        torch._foreach_mul_(changes, [scale for *_, scale in part.scaled])
        if extra_scale != 1.0:
            change.mul_(extra_scale)
        if rates.weight_decay != 0.0:
            torch._foreach_add_(main, main, alpha=-rates.weight_decay * rates.lr)
        torch._foreach_add_(main, changes, alpha=-rates.lr)
        if main is not weights:
            torch._foreach_copy_(weights, main)

    def _weights_of(self, group: FsdpParameterGroup) -> list[list[torch.Tensor]]:
        """Return the main weights of each part, cut as ``scaled``, at their current address."""
        main = group.weights.main.local.data
        if main.data_ptr() != self._address:
            self._address = main.data_ptr()
            self._weights = [[main[begin : begin + numel] for begin, numel, _ in part.scaled] for part in self.parts]
        return self._weights
