"""Muon on this rank's shards of matrices, and AdamW on all other parameters, as one optimizer."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.flat_optimizer.flat_adamw import FlatAdamW
from megatron.core.distributed.fsdp.flat_optimizer.flat_state import FlatState
from megatron.core.distributed.fsdp.flat_optimizer.hyperparameter_table import HyperparameterTable
from megatron.core.distributed.fsdp.flat_optimizer.muon_update import (
    MuonState,
    MuonUpdate,
    Rates,
    RoundPart,
    make_muon_update,
)
from megatron.core.distributed.fsdp.matrices.newton_schulz import NewtonSchulz, newton_schulz_coefficients
from megatron.core.distributed.fsdp.matrices.orthogonalizer import ROUND_NUMEL, OrthogonalizedMatrices, Orthogonalizer
from megatron.core.distributed.fsdp.matrices.shared_matrix import (
    TENSOR_PARALLEL_MODES,
    SharedMatrix,
    TensorParallelMode,
    shared_matrix_of,
)
from megatron.core.distributed.fsdp.runtime.context import FsdpContext

ScaleMode = Literal["spectral", "unit_rms_norm", "shape_scaling"]
RowBlocks = Callable[[torch.Tensor], Sequence[int] | None]

_SCALES: dict[str, Callable[[int, int], float]] = {
    # J. Liu et al. (arXiv:2502.16982), T. Pethick et al. (arXiv:2502.07529), K. Jordan et al. (2024).
    "spectral": lambda rows, columns: max(rows, columns) ** 0.5,
    "unit_rms_norm": lambda rows, columns: (rows / columns) ** 0.5,
    "shape_scaling": lambda rows, columns: max(1.0, rows / columns) ** 0.5,
}
# Names of precision of products in fp32, and whether these are bf16 products in fact.
_PRECISIONS = ("medium", "high", "highest")
_EPS = 1e-15


class FlatMuon(FlatAdamW):
    """Muon for matrices, and ``FlatAdamW`` for all other parameters, of a model after ``fully_shard``.

    Momentum and main weights stay sharded. In a step each matrix's elements are brought to one rank, which orthogonalizes
    it by Newton-Schulz iterations and returns to each rank its elements of the result. Work is divided over the ranks that
    share main weights by its arithmetic; exchanges overlap it. Replicas (``no_shard``, the outer axis of HSDP) repeat it.

    A step is: momentum.lerp_(gradient, 1 - ``momentum``); with ``nesterov`` gradient.lerp(momentum, ``momentum``), else the
    momentum, is orthogonalized, scaled and subtracted ``lr`` times from the weight, which was decayed by
    ``lr * weight_decay`` before. Matrices of equal shape are multiplied in batches of a fixed size, so that results do not
    depend on the number of ranks.

    Args:
        params: as ``FlatAdamW``. Param groups with ``use_muon=True`` must hold only matrices; all others are AdamW's.
        momentum, nesterov: of Muon; also in param groups.
        coefficient_type, num_ns_steps: Newton-Schulz iterations: ``newton_schulz_coefficients``.
        scale_mode: factor of an orthogonalized [R, C] matrix: ``spectral`` sqrt(max(R, C)), ``unit_rms_norm`` sqrt(R / C),
            ``shape_scaling`` sqrt(max(1, R / C)).
        extra_scale_factor: another factor; 0.2 makes updates about as large as AdamW's.
        fp32_matmul_prec: ``medium`` iterates in bf16, ``high`` and ``highest`` in fp32 as
            ``torch.set_float32_matmul_precision`` has it.
        tp_mode: matrices that tensor parallelism splits: ``duplicated`` and ``distributed`` orthogonalize the whole (each
            rank the whole, or its part with products summed over the ranks), ``blockwise`` each rank's part by itself.
        row_blocks_of: returns heights of blocks of rows that follow each other again and again in a parameter; all blocks
            of one place are orthogonalized as a matrix of their own. None: the parameter is one matrix.
        gram_iterations: with ``medium``, iterate on X X^T in fp16 where a device has the kernels, with less than half the arithmetic;
            results are nearer to those of exact arithmetic than bf16's. False: always on X in bf16.
        round_numel: elements of matrices that a rank receives in one exchange, about. More take more memory (with
            ``gram_iterations`` 15 bytes for each are kept, and about 16 while rounds are under way), and fewer launches.
        overlaps_forward: as ``FlatAdamW``, where the model is one root of ``fully_shard``, not several (virtual stages).

    Raises:
        ValueError: as ``FlatAdamW``; a parameter for Muon is no matrix; a setting is unknown.

    State of a matrix is ``momentum_buffer``, in fp32 and placed like it.

    Ranks: all that hold the parameters build it, with the same parameters in the same order.
    Source: K. Jordan et al., Muon (2024); order of operations, defaults and names as in Megatron-Core's.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        momentum: float = 0.95,
        nesterov: bool = False,
        coefficient_type: str = "quintic",
        num_ns_steps: int = 5,
        scale_mode: ScaleMode = "spectral",
        extra_scale_factor: float = 1.0,
        fp32_matmul_prec: str = "medium",
        tp_mode: TensorParallelMode = "duplicated",
        row_blocks_of: RowBlocks | None = None,
        gram_iterations: bool = True,
        round_numel: int = ROUND_NUMEL,
        overlaps_forward: bool = False,
    ) -> None:
        _check_choices(("scale_mode", scale_mode, tuple(_SCALES)), ("tp_mode", tp_mode, TENSOR_PARALLEL_MODES))
        _check_choices(("fp32_matmul_prec", fp32_matmul_prec, _PRECISIONS))
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {momentum}")
        in_bf16 = fp32_matmul_prec == "medium"
        self._iterate = NewtonSchulz(
            coefficients=newton_schulz_coefficients(coefficient_type, num_ns_steps),
            eps=_EPS,
            dtype=torch.bfloat16 if in_bf16 else torch.float32,
            fp32_precision=None if in_bf16 else fp32_matmul_prec,
            may_use_grams=in_bf16 and gram_iterations,
        )
        self._scale, self._extra_scale = _SCALES[scale_mode], extra_scale_factor
        self._tp_mode, self._row_blocks_of = tp_mode, row_blocks_of
        self._more_defaults = {"use_muon": False, "momentum": momentum, "nesterov": nesterov}
        self._matrices: dict[torch.Tensor, SharedMatrix] = {}
        self._orthogonalizer: Orthogonalizer | None = None  # of the matrices of the last step
        self._numbered: list[torch.Tensor] = []
        self._uses_muon: list[bool] = []  # of the param groups, once they are there
        self._round_numel = round_numel
        self._work: MuonUpdate | None = None
        self._run: OrthogonalizedMatrices | None = None
        super().__init__(params, lr, betas, eps, weight_decay, overlaps_forward=overlaps_forward)

    def _make_state(self, group: FsdpParameterGroup, *, keeps_remainder: bool) -> FlatState:
        param_group_of = {
            parameter: number
            for number, param_group in enumerate(self.param_groups)
            if param_group["use_muon"]
            for parameter in param_group["params"]
        }
        param_groups = [param_group_of.get(parameter) for parameter in group.sharded]
        if all(number is None for number in param_groups):
            return FlatState(group, keeps_remainder=keeps_remainder)
        for parameter in (p for p, number in zip(group.sharded, param_groups, strict=True) if number is not None):
            blocks = None if self._row_blocks_of is None else self._row_blocks_of(parameter)
            self._matrices[parameter] = shared_matrix_of(parameter, row_blocks=blocks, tensor_mode=self._tp_mode)
        self._work = self._work or make_muon_update(group.device)
        return MuonState(group, param_groups, self._work)

    def _lay_out(self) -> None:
        super()._lay_out()
        self._orthogonalizer = None  # numbers are given again at the next step

    def _shown_state(
        self, parameter: torch.Tensor, views: Mapping[str, DTensor], table: HyperparameterTable
    ) -> dict[str, torch.Tensor]:
        return dict(views) if parameter in self._matrices else super()._shown_state(parameter, views, table)

    def _check_param_groups(self) -> None:
        super()._check_param_groups()
        uses = [bool(group["use_muon"]) for group in self.param_groups]
        self._uses_muon = self._uses_muon or uses
        if uses != self._uses_muon:
            raise NotImplementedError(
                f"FlatMuon needs param groups whose use_muon is as when it was built, {self._uses_muon}, got {uses}; build "
                "another one over these groups"
            )

    # ---- the step -----------------------------------------------------------------------------------------------

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        grad_factor: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
    ) -> Any:
        """Update main and model weights, as ``FlatAdamW.step``; with ``found_inf`` the host waits for it.

        Ranks: all that hold the parameters; ``found_inf`` must be the same on all.
        """
        if found_inf is not None and bool(found_inf):
            return closure() if closure is not None else None
        try:
            return super().step(closure, grad_factor=grad_factor)
        finally:
            self._run = None  # it refers to this optimizer, and holds what was sent

    def _overlaps(self, contexts: Sequence[FsdpContext]) -> bool:
        # Each context has an update stream of its own, and a round holds matrices of all: what one computes, all would have to
        # wait for.
        return self.overlaps_forward and len(contexts) == 1

    def _begin_updates(self, groups: Sequence[FsdpParameterGroup], factor: torch.Tensor) -> None:
        self._factor = factor
        self._rates = [_rates_of(group) if group["use_muon"] else None for group in self.param_groups]
        orthogonalizer = self._number(
            [p for group in groups for p in group.sharded if p in self._matrices and p not in self._idle]
        )
        self._run = orthogonalizer.begin(self._fill, list(map(len, self._senders)))

    def _number(self, parameters: list[torch.Tensor]) -> Orthogonalizer:
        """Give the matrices of this step numbers, unless they are those of the step before; return what works on them."""
        is_same = len(parameters) == len(self._numbered) and all(map(operator.is_, parameters, self._numbered))
        if self._orthogonalizer is not None and is_same:
            return self._orthogonalizer
        self._numbered = parameters
        number_of = {parameter: number for number, parameter in enumerate(parameters)}
        matrices, device = [self._matrices[parameter] for parameter in parameters], self._tables[0].device
        found = Orthogonalizer(matrices, self._iterate, device, round_numel=self._round_numel)
        self._orthogonalizer, places = found, found.places
        self._senders: list[list[tuple[MuonState, RoundPart]]] = [[] for _ in range(found.num_rounds)]
        for group, state in self._living():
            if isinstance(state, MuonState):
                numbers = [number_of.get(parameter) for parameter in group.sharded]
                shared = [self._matrices.get(parameter) for parameter in group.sharded]
                scaled = [[] if matrix is None else matrix.pieces_by_block(self._scale) for matrix in shared]
                state.lay_out_matrices([None if n is None else places[n] for n in numbers], scaled)
                for part in state.parts:
                    self._senders[part.round_number].append((state, part))
        return found

    def _fill(self, round_number: int, sent: torch.Tensor) -> None:
        """Bring gradients into the momentum, and write what this rank has of the round's matrices to ``sent``."""
        assert self._work is not None
        for state, part in self._senders[round_number]:
            group, rates = state.group(), self._rates[part.param_group]
            assert group is not None and rates is not None, "it is being updated"
            grad = group.grads.main.storage.flat
            self._work.accumulate(part, rates, grad, state.momentum, sent, self._factor)

    def _update_group(self, group: FsdpParameterGroup) -> None:
        state, weights = self._state_of[id(group)], group.weights
        if not isinstance(state, MuonState):
            super()._update_group(group)
            return
        weights.begin_update(is_whole=False)
        leaves_some = bool(self._idle) and not self._idle.isdisjoint(group.sharded)
        # What is written whole by elementwise casts needs no pass of its own.
        is_cast = weights.codec.casts and not leaves_some
        model = weights.piece_of_update if is_cast else None
        grad = group.grads.main.storage.flat
        state.update_vectors(group, model, grad, self._tables[0].coefficients)
        assert self._run is not None and self._work is not None, "a step has begun, and there are matrices"
        for part in state.parts:
            rates = self._rates[part.param_group]
            assert rates is not None
            result = self._run.take(part.round_number)
            self._work.apply(part, rates, weights.main.local.data, model, result, self._extra_scale)
        if not is_cast:
            weights.end_partial_update()


def _rates_of(param_group: dict[str, Any]) -> Rates:
    lr = param_group["lr"]
    if isinstance(lr, torch.Tensor) and lr.device.type != "cpu":
        raise NotImplementedError(
            f"FlatMuon needs learning rates as numbers, got a tensor on {lr.device}; set param_group['lr'] to a float"
        )
    return Rates(float(lr), float(param_group["weight_decay"]), param_group["momentum"], param_group["nesterov"])


def _check_choices(*settings: tuple[str, str, tuple[str, ...]]) -> None:
    for name, value, choices in settings:
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
