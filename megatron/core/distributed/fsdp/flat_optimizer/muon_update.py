"""What Muon does with each element: as torch operations, or as one kernel before and one after the orthogonalization."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


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
    sending: Table | None = None
    receiving: Table | None = None


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


class TorchMuonUpdate:
    """The work as torch operations."""

    has_kernels = False

    def prepare(self, part: RoundPart, device: torch.device) -> None:
        """Make the tables that the other functions need."""

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


class KernelMuonUpdate(TorchMuonUpdate):
    """The work as Triton kernels: one launch each."""

    has_kernels = True

    def __init__(self) -> None:
        from megatron.core.distributed.fsdp.flat_optimizer import muon_kernels

        self._kernels = muon_kernels
        self._options = {"num_warps": muon_kernels.NUM_WARPS, "enable_fp_fusion": False}

    def table(self, rows: Sequence[tuple[int, int, int, int]], device: torch.device, *, places: int = 3) -> Table:
        """Cut rows (some numbers, and last the elements) into blocks. The first ``places`` numbers grow with the elements."""
        align = math.gcd(16, *(number for row in rows for number in (*row[:places], row[3])))
        size = self._kernels.BLOCK_NUMEL
        tables = [torch.empty(0, 4, dtype=torch.int64)]
        for row in rows:
            done = torch.arange(0, row[3], size)
            numbers = [(done + at) // align if place < places else done * 0 + at for place, at in enumerate(row[:3])]
            tables.append(torch.stack([*numbers, (row[3] - done).clamp(max=size) // align], dim=1))
        return Table(torch.cat(tables).int().to(device), align)

    def prepare(self, part: RoundPart, device: torch.device) -> None:
        part.sending = self.table([stretch[:4] for stretch in part.stretches], device)
        size = self._kernels.BLOCK_NUMEL
        scales = [torch.full((-(-stretch.numel // size),), stretch.scale) for stretch in part.scaled]
        part.receiving = self.table([stretch[:4] for stretch in part.scaled], device)._replace(
            scales=torch.cat([torch.empty(0), *scales]).to(device)
        )

    def accumulate(
        self,
        part: RoundPart,
        rates: Rates,
        grad: torch.Tensor,
        momentum: torch.Tensor,
        sent: torch.Tensor,
        factor: torch.Tensor,
    ) -> None:
        table = part.sending
        assert table is not None
        if table.blocks.shape[0]:
            self._kernels.momentum_kernel[(table.blocks.shape[0],)](
                grad,
                momentum,
                sent,
                factor,
                table.blocks,
                rates.momentum,
                1 - rates.momentum,
                rates.nesterov,
                table.align,
                self._kernels.BLOCK_NUMEL,
                **self._options,
            )

    def apply(
        self,
        part: RoundPart,
        rates: Rates,
        main: torch.Tensor,
        model: torch.Tensor | None,
        result: torch.Tensor,
        extra_scale: float,
    ) -> None:
        table = part.receiving
        assert table is not None
        if table.blocks.shape[0]:
            self._kernels.subtract_kernel[(table.blocks.shape[0],)](
                main,
                main if model is None else model,
                result,
                table.blocks,
                table.scales,
                -rates.weight_decay * rates.lr,
                -rates.lr,
                extra_scale,
                model is not None,
                table.align,
                self._kernels.BLOCK_NUMEL,
                **self._options,
            )

    def update_vectors(
        self,
        table: Table,
        main: torch.Tensor,
        model: torch.Tensor | None,
        grad: torch.Tensor,
        state: tuple[torch.Tensor, torch.Tensor],
        coefficients: torch.Tensor,
    ) -> None:
        """Update by AdamW what ``table`` says, of rows ``VectorRun``."""
        self._kernels.vectors_kernel[(table.blocks.shape[0],)](
            main,
            main if model is None else model,
            grad,
            *state,
            table.blocks,
            coefficients,
            model is not None,
            table.align,
            self._kernels.BLOCK_NUMEL,
            **self._options,
        )


def make_muon_update(device: torch.device) -> TorchMuonUpdate:
    """Return the update for shards on the device: by Triton kernels where they can run."""
    can_run: Any = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    return KernelMuonUpdate() if can_run and importlib.util.find_spec("triton") is not None else TorchMuonUpdate()
