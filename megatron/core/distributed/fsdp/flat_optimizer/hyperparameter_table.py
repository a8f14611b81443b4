"""HyperparameterTable: parameters of one group of the engine that step alike, and the small device tables that tell kernels how."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.flat_optimizer.adamw_update import COLUMNS, HYPERPARAMETERS, HyperparameterColumns

_SERVED = {"amsgrad": False, "maximize": False, "decoupled_weight_decay": True}


class HyperparameterTable:
    """Parameters with one group of the engine, one of the optimizer's, and one count of steps.

    Counts, hyperparameters and what follows from them are on the device, at addresses that stay: a captured graph
    counts its replays, and sees what ``refresh`` wrote before it.

    Args:
        param_groups: the optimizer's.
        groups: [E] the engine's, which hold the same parameters.
    """

    def __init__(
        self, param_groups: Sequence[Mapping[str, Any]], groups: Sequence[FsdpParameterGroup], device: torch.device
    ) -> None:
        self.device = device
        group_of = {p: index for index, group in enumerate(param_groups) for p in group["params"]}
        self._members = [(at, group_of[p], p) for at, group in enumerate(groups) for p in group.sharded]
        self._keys: list[tuple[int, int, float]] = []
        self._hyperparameters = torch.zeros(len(param_groups), len(HYPERPARAMETERS), dtype=torch.float64, device=device)
        self._cells = [row.unbind() for row in self._hyperparameters.unbind()]
        self._written: list[tuple[float, ...]] = [()] * len(param_groups)
        self._active: frozenset[int] = frozenset(range(len(groups)))
        self.of_parameter: dict[torch.Tensor, int] = {}
        self.table: HyperparameterColumns
        self.assign({})

    def assign(self, steps: Mapping[torch.Tensor, float]) -> bool:
        """Afterwards each parameter has taken ``steps`` (0 where absent); True if cohorts are not what they were."""
        keys = {p: (at, group, float(steps.get(p, 0.0))) for at, group, p in self._members}
        found = sorted(set(keys.values()))
        cohort_of = {key: cohort for cohort, key in enumerate(found)}
        of_parameter: dict[torch.Tensor, int] = {p: cohort_of[key] for p, key in keys.items()}
        self._keys = found
        if of_parameter == self.of_parameter:
            self.table.steps[: len(found)].copy_(torch.tensor([step for *_, step in found]))
            return False
        self.of_parameter = of_parameter
        self.table = self._make_table()
        self._write_advances()
        return True

    def _make_table(self) -> HyperparameterColumns:
        size = 1 << (len(self._keys) - 1).bit_length()
        padded = [*self._keys, *[(-1, 0, 0.0)] * (size - len(self._keys))]
        return HyperparameterColumns(
            hyperparameters=self._hyperparameters,
            group_of_cohort=torch.tensor([group for _, group, _ in padded], dtype=torch.int32, device=self.device),
            steps=torch.tensor([step for *_, step in padded], dtype=torch.float32, device=self.device),
            advances=torch.zeros(size, dtype=torch.float32, device=self.device),
            coefficients=torch.zeros(size, len(COLUMNS), dtype=torch.float32, device=self.device),
        )

    def step_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """[] fp32 steps that the parameter has taken; a view, which its cohort shares."""
        return self.table.steps[self.of_parameter[parameter]]

    def set_active(self, groups: Collection[int]) -> None:
        """Afterwards these of the engine's groups take part in the next step, and others do not."""
        if groups != self._active:
            self._active = frozenset(groups)
            self._write_advances()

    def _write_advances(self) -> None:
        advances = torch.zeros(self.table.advances.numel())
        for cohort, (at, *_) in enumerate(self._keys):
            advances[cohort] = float(at in self._active)
        self.table.advances.copy_(advances)

    def refresh(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """Afterwards the device knows the hyperparameters as they are now; only what changed is written.

        Raises:
            NotImplementedError: a variant of AdamW that is not served.
            RuntimeError: something changed in a graph capture, whose replays would set it back.
        """
        for index, group in enumerate(param_groups):
            lr = group["lr"]
            on_device = isinstance(lr, torch.Tensor) and lr.device.type != "cpu"
            values = (0.0 if on_device else float(lr), group["weight_decay"], *group["betas"], group["eps"])
            if on_device:
                self._cells[index][0].copy_(lr.reshape(()))
            if values != self._written[index]:
                self._write(index, group, values, skips_lr=on_device)

    def _write(self, index: int, group: Mapping[str, Any], values: tuple[float, ...], *, skips_lr: bool) -> None:
        for key, served in _SERVED.items():
            if group.get(key, served) is not served:
                raise NotImplementedError(f"FlatAdamW serves {key}={served} alone, got {group[key]} in group {index}")
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "hyperparameters must be on the device before a graph is captured, got a change within; call "
                "refresh_hyperparameters() before the capture and before each replay"
            )
        before = self._written[index] or (None,) * len(values)
        for column, (value, old) in enumerate(zip(values, before, strict=True)):
            if value != old and not (column == 0 and skips_lr):
                self._cells[index][column].fill_(value)
        self._written[index] = values
