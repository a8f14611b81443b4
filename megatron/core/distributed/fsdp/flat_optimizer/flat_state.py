"""AdamW's state of one parameter group: flat buffers beside its main weights, and views of them by parameter."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.dtensor.uneven_dtensor import placed_like
from megatron.core.distributed.fsdp.flat_optimizer.adamw_update import FlatShard, TorchUpdate
from megatron.core.distributed.fsdp.flat_optimizer.flat_runs import Run, runs_of

EXP_AVG, EXP_AVG_SQ, REMAINDER, STEP = "exp_avg", "exp_avg_sq", "param_remainder", "step"


class FlatState:
    """State of a group, which it references weakly; all zeros at first.

    Args:
        keeps_remainder: the main weights are the upper halves of fp32 ones, whose lower halves are kept here.

    Attributes:
        views: [T] state of each parameter by key, as DTensors that are placed like the parameter.
    """

    def __init__(self, group: FsdpParameterGroup, *, keeps_remainder: bool) -> None:
        self.group = weakref.ref(group)
        main = group.weights.main.local
        self._flat: dict[str, torch.Tensor] = {}
        self.views: list[dict[str, DTensor]] = [{} for _ in group.sharded]
        for key in (EXP_AVG, EXP_AVG_SQ):
            self._show(group, key, self._zeros(main, torch.float32))
        self.remainder: torch.Tensor | None = None
        if keeps_remainder:
            self.remainder = self._zeros(main, torch.int16)
            self._show(group, REMAINDER, self.remainder)
        group.note_state(on_device=sum(flat.numel() * flat.element_size() for flat in self._flat.values()))
        self._runs: tuple[Run, ...] = ()
        self._blocks: torch.Tensor | None = None
        self._addresses = (0, 0)
        self._seen_version = 0
        self.note_version(group)

    def _zeros(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros_like(like, dtype=dtype, memory_format=torch.contiguous_format)

    def _show(self, group: FsdpParameterGroup, key: str, flat: torch.Tensor) -> None:
        """Make ``flat`` state under ``key``, with views by parameter."""
        self._flat[key] = flat
        for index, (parameter, views) in enumerate(zip(group.sharded, self.views, strict=True)):
            views[key] = view_like(parameter, flat, group, index)

    def lay_out(
        self, group: FsdpParameterGroup, table_rows: Sequence[int], only: Sequence[bool], update: TorchUpdate
    ) -> None:
        """Prepare updates of tensor ``t``, if ``only[t]``, with the coefficients in row ``table_rows[t]``."""
        by_tensor = group.weights.codec.encodes_by_tensor
        self._runs = tuple(runs_of(group.weights.main, table_rows, only, by_tensor=by_tensor))
        self._blocks = update.blocks(self._runs, group.device)
        self._make_shard(group)

    def _make_shard(self, group: FsdpParameterGroup) -> None:
        self._addresses = (group.weights.main.local.data_ptr(), group.weights.model.local.data_ptr())
        self._shard = FlatShard(
            # ``.data`` has its own version counter, so autograd does not take weights that it saved for modified.
            main=group.weights.main.local.data,
            exp_avg=self._flat[EXP_AVG],
            exp_avg_sq=self._flat[EXP_AVG_SQ],
            remainder=self.remainder,
            model=group.weights.piece_of_update,
            runs=self._runs,
            blocks=self._blocks,
        )

    def shard(self, group: FsdpParameterGroup) -> FlatShard:
        """Return the buffers of an update at their current addresses."""
        if (group.weights.main.local.data_ptr(), group.weights.model.local.data_ptr()) != self._addresses:
            self._make_shard(group)
        return self._shard

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def complete(self, group: FsdpParameterGroup) -> None:
        """Make the state that is made only when it is asked for; here there is none."""

    def shrink(self) -> None:
        """Give back the memory of what ``complete`` has made."""

    def adopt(self, group: FsdpParameterGroup) -> None:
        """Go on from what was read into the views and the main weights."""
        self.note_version(group)

    # ---- writes from outside ------------------------------------------------------------------------------------

    def note_version(self, group: FsdpParameterGroup) -> None:
        """Record that the main weights as they are now belong to the remainders."""
        if self.remainder is not None:
            self._seen_version = group.weights.freshness.write_count

    def drop_stale_remainder(self, group: FsdpParameterGroup) -> None:
        """Zero the remainders if anything but this optimizer has written to the main weights."""
        if self.remainder is not None and group.weights.freshness.write_count != self._seen_version:
            self.remainder.zero_()
            self.note_version(group)


def view_like(parameter: torch.Tensor, flat: torch.Tensor, group: FsdpParameterGroup, index: int) -> DTensor:
    assert isinstance(parameter, DTensor)
    own = group.weights.main.view(index)
    begin = own.storage_offset() - group.weights.main.local.storage_offset()
    return placed_like(parameter, flat[begin : begin + own.numel()].view(own.shape))
