"""The hyperparameters and step counts of ``FlatAdamW`` on the device, in a table whose rows kernels look up."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup

# Columns of the hyperparameters [P, 5] fp64, and of the coefficients [R, 9] fp32 that a step computes from them.
HYPERPARAMETERS = ("lr", "weight_decay", "beta1", "beta2", "eps")
COLUMNS = (
    "decay",
    "1 - beta1",
    "beta2",
    "1 - beta2",
    "-step size",
    "sqrt(1 - beta2^t)",
    "eps",
    "gradient factor",
    "skips",
)
_SERVED = {"amsgrad": False, "maximize": False, "decoupled_weight_decay": True, "differentiable": False}


class HyperparameterTable:
    """A row for each combination of parameter group (the engine's), param group (the optimizer's), step count and idleness.

    The tensors are on the device and keep their addresses: a replayed CUDA graph counts its own steps, and reads the
    hyperparameters that ``refresh`` wrote before the replay.

    Args:
        param_groups: the optimizer's param groups.
        groups: [E] the engine's parameter groups, which hold the same parameters.

    Attributes:
        row_of: the row of each parameter.
        hyperparameters: [P, 5] fp64 hyperparameters of each param group, in the columns of ``HYPERPARAMETERS``.
        param_group: [R] int32 param group of each row. R is a power of two; the last rows may be unused.
        steps: [R] fp32 steps taken, as torch counts them.
        advances: [R] fp32 1 for rows that take part in the next step, else 0.
        coefficients: [R, 9] fp32 coefficients of the next step, in the columns of ``COLUMNS``.
    """

    def __init__(
        self, param_groups: Sequence[Mapping[str, Any]], groups: Sequence[FsdpParameterGroup], device: torch.device
    ) -> None:
        self.device = device
        param_group_of = {p: index for index, group in enumerate(param_groups) for p in group["params"]}
        self._members = [(at, param_group_of[p], p) for at, group in enumerate(groups) for p in group.sharded]
        self._index_of: dict[torch.Tensor, int] = {p: index for index, (_, _, p) in enumerate(self._members)}
        self._rows: list[tuple[int, int, float, bool]] = []
        self._idle: Collection[torch.Tensor] = ()
        self.hyperparameters = torch.zeros(len(param_groups), len(HYPERPARAMETERS), dtype=torch.float64, device=device)
        self._cells = [row.unbind() for row in self.hyperparameters.unbind()]
        self._written: list[tuple[float, ...]] = [()] * len(param_groups)
        self._active: frozenset[int] = frozenset(range(len(groups)))
        self.row_of: dict[torch.Tensor, int] = {}
        self.set_steps({})

    def set_idle(self, idle: Collection[torch.Tensor]) -> None:
        """Let these parameters take no part in the next steps, but those of their groups. Blocks the host."""
        self._idle = idle
        steps = self.steps.tolist()
        self.set_steps({p: steps[row] for p, row in self.row_of.items()})
        self._write_advances()

    def set_steps(self, steps: Mapping[torch.Tensor, float]) -> bool:
        """Set each parameter's step count (0 where absent); return True if parameters have other rows than before."""
        keys = {p: (at, group, float(steps.get(p, 0.0)), p in self._idle) for at, group, p in self._members}
        self._rows = sorted(set(keys.values()))
        place = {key: row for row, key in enumerate(self._rows)}
        row_of: dict[torch.Tensor, int] = {p: place[key] for p, key in keys.items()}
        is_new = row_of != self.row_of
        if is_new:
            self.row_of = row_of
            self._make_rows()
            self._write_advances()
        else:
            self.steps[: len(self._rows)].copy_(torch.tensor([step for _, _, step, _ in self._rows]))
        self.show_steps()
        self._seen_version = self._shown_steps._version
        return is_new

    def _make_rows(self) -> None:
        size = 1 << (len(self._rows) - 1).bit_length()
        padded = [*self._rows, *[(-1, 0, 0.0, True)] * (size - len(self._rows))]
        self.param_group = torch.tensor([group for _, group, _, _ in padded], dtype=torch.int32, device=self.device)
        self.steps = torch.tensor([step for _, _, step, _ in padded], dtype=torch.float32, device=self.device)
        self.advances = torch.zeros(size, dtype=torch.float32, device=self.device)
        self.coefficients = torch.zeros(size, len(COLUMNS), dtype=torch.float32, device=self.device)
        self._row_of_member = torch.tensor([self.row_of[p] for _, _, p in self._members], device=self.device)
        # For ``state``, by parameter: parameters of one row must not share what users may write.
        self._shown_steps = torch.zeros(len(self._members), dtype=torch.float32, device=self.device)

    def show_steps(self) -> None:
        """Copy the step counts to what ``step_of`` returned, whose version counter counts the writes of users only."""
        torch.index_select(self.steps, 0, self._row_of_member, out=self._shown_steps.data)

    def step_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the parameter's step count, [] fp32: a view of what ``show_steps`` writes."""
        return self._shown_steps[self._index_of[parameter]]

    @property
    def steps_are_shown(self) -> bool:
        """Whether nobody has written to what ``step_of`` returned."""
        return self._shown_steps._version == self._seen_version

    def set_active(self, groups: Collection[int]) -> None:
        """Let only these parameter groups, by index, take part in the next step."""
        if groups != self._active:
            self._active = frozenset(groups)
            self._write_advances()

    def _write_advances(self) -> None:
        advances = torch.tensor([float(at in self._active and not idle) for at, _, _, idle in self._rows])
        self.advances[: len(self._rows)].copy_(advances)

    def refresh(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """Copy hyperparameters that have changed to the device.

        Raises:
            NotImplementedError: a param group asks for a variant of AdamW that is not served.
            RuntimeError: a hyperparameter changed within a graph capture, whose replays would reset it each time.
        """
        for index, group in enumerate(param_groups):
            lr = group["lr"]
            on_device = isinstance(lr, torch.Tensor) and lr.device.type != "cpu"
            # Numbers, not tensors, in which a write in place could not be seen.
            rates = map(float, (group["weight_decay"], *group["betas"], group["eps"]))
            values = (0.0 if on_device else float(lr), *rates)
            for key, served in _SERVED.items():
                if group.get(key, served) is not served:
                    raise NotImplementedError(
                        f"FlatAdamW needs {key}={served}, got {group[key]} in param group {index}"
                    )
            if on_device:
                self._cells[index][0].copy_(lr.reshape(()))
            if values != self._written[index]:
                self._write(index, values, skips_lr=on_device)

    def _write(self, index: int, values: tuple[float, ...], *, skips_lr: bool) -> None:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "hyperparameters must not change within a graph capture, got a change; call refresh_hyperparameters() "
                "before the capture and before each replay"
            )
        before = self._written[index] or (None,) * len(values)
        for column, (value, old) in enumerate(zip(values, before, strict=True)):
            if value != old and not (column == 0 and skips_lr):
                self._cells[index][column].fill_(value)
        self._written[index] = values
