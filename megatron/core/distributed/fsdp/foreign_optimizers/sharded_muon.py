"""``torch.optim.Muon`` on sharded matrices: each is orthogonalized whole on one of the ranks that share it."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim._muon import _adjust_lr

from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup, group_of
from megatron.core.distributed.fsdp.buffers.sharded_grad import local_gradient
from megatron.core.distributed.fsdp.matrices.newton_schulz import NewtonSchulz
from megatron.core.distributed.fsdp.matrices.orthogonalizer import Orthogonalizer
from megatron.core.distributed.fsdp.matrices.shared_matrix import shared_matrix_of


def prepare_muon(optimizer: torch.optim.Optimizer, groups: Sequence[FsdpParameterGroup]) -> None:
    """Let a ``torch.optim.Muon`` step on parameters of these groups; other optimizers are left alone, a prepared one too.

    Its class changes to one that overrides ``_init_group``, which every ``step`` calls, also one that a scheduler or
    another library has wrapped.

    Ranks: all that hold the parameters.
    """
    if groups and type(optimizer) is torch.optim.Muon:
        optimizer.__class__ = ShardedMuon


class ShardedMuon(torch.optim.Muon):
    """``torch.optim.Muon`` whose sharded parameters are updated as whole ones would be; hyperparameters and state are torch's.

    Ranks: all that hold the parameters step together, with gradients for the same ones.
    """

    def _init_group(
        self,
        group: MutableMapping[str, Any],
        params_with_grad: list[torch.Tensor],
        grads: list[torch.Tensor],
        muon_momentum_bufs: list[torch.Tensor],
    ) -> bool:
        """Update the group's sharded parameters; collect the others, which torch updates."""
        found: tuple[list[torch.Tensor], ...] = ([], [], [])
        has_complex: bool = super()._init_group(group, *found)
        sharded: tuple[list[torch.Tensor], ...] = ([], [], [])
        for tensors in zip(*found, strict=True):
            targets = (params_with_grad, grads, muon_momentum_bufs) if group_of(tensors[0]) is None else sharded
            for target, tensor in zip(targets, tensors, strict=True):
                target.append(tensor)
        if sharded[0]:
            self._update(group, *sharded)
        return has_complex

    def _update(
        self,
        group: MutableMapping[str, Any],
        parameters: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        momenta: Sequence[torch.Tensor],
    ) -> None:
        orthogonalizer = self._orthogonalizer_of(group, parameters)
        weights, averages = (list(map(_local, tensors)) for tensors in (parameters, momenta))
        gradients = list(map(local_gradient, grads, parameters))

        def fill(round_number: int, sent: torch.Tensor) -> None:
            numbers, numels = orthogonalizer.numbers_of(round_number)
            held = [number for number in numbers if gradients[number].numel()]
            own, average = [gradients[number] for number in held], [averages[number] for number in held]
            found = average
            if held:
                torch._foreach_lerp_(average, own, 1 - group["momentum"])
                if group["nesterov"]:
                    found = list(torch._foreach_lerp(own, average, group["momentum"]))
            by_number = dict(zip(held, found, strict=True))
            pieces = [by_number.get(number, gradients[number]).reshape(-1) for number in numbers]
            torch._foreach_copy_(list(sent.split(numels)), pieces)

        run = orthogonalizer.begin(fill, [1] * orthogonalizer.num_rounds)
        lr = group["lr"].item() if isinstance(group["lr"], torch.Tensor) else group["lr"]
        decay = 1 - lr * group["weight_decay"]
        for at in range(orthogonalizer.num_rounds):
            numbers, numels = orthogonalizer.numbers_of(at)
            results = run.take(at).split(numels)
            by_rate: dict[float, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
            for number, result in zip(numbers, results, strict=True):
                weight = weights[number]
                if weight.numel():
                    rate = _adjust_lr(lr, group["adjust_lr_fn"], parameters[number].shape)
                    mine, updates = by_rate.setdefault(rate, ([], []))
                    mine.append(weight)
                    updates.append(result.to(weight.dtype).view(weight.shape))
            for rate, (mine, updates) in by_rate.items():
                _decay_and_subtract(mine, updates, decay=decay, rate=rate)

    def _orthogonalizer_of(self, group: MutableMapping[str, Any], parameters: Sequence[torch.Tensor]) -> Orthogonalizer:
        """Return what was made for these parameters and settings, which are most often those of the step before."""
        settings = (tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"])
        key = (settings, *map(id, parameters))
        made: dict[int, Any] = self.__dict__.setdefault("_made", {})
        place = next(at for at, own in enumerate(self.param_groups) if own is group)
        if place not in made or made[place][0] != key:
            (a, b, c), steps, eps = settings
            iterate = NewtonSchulz(coefficients=((a, b, c),) * steps, eps=eps, norm_dtype=torch.bfloat16)
            matrices = [shared_matrix_of(parameter) for parameter in parameters]
            made[place] = key, Orthogonalizer(matrices, iterate, parameters[0].device), list(parameters)
        found: Orthogonalizer = made[place][1]
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is made at the next step, which refers to process groups."""
        state: dict[str, Any] = {key: value for key, value in super().__getstate__().items() if key != "_made"}
        return state


def _decay_and_subtract(weights: list[torch.Tensor], updates: list[torch.Tensor], *, decay: float, rate: float) -> None:
    if weights[0].device.type == "cpu" and weights[0].dtype != torch.float32:
        # There the multi-tensor functions round the factors to the tensors' dtype.
        for weight, update in zip(weights, updates, strict=True):
            weight.mul_(decay).add_(update, alpha=-rate)
        return
    torch._foreach_mul_(weights, decay)
    torch._foreach_add_(weights, updates, alpha=-rate)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
