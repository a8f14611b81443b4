"""AdamW's state of one parameter group: flat buffers next to its main weights or on the host, and views by parameter."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.dtensor.uneven_dtensor import placed_like
from megatron.core.distributed.fsdp.flat_optimizer.adamw_update import AdamWUpdate, FlatShard, join, round_up_half
from megatron.core.distributed.fsdp.flat_optimizer.flat_runs import Run, runs_of
from megatron.core.distributed.fsdp.flat_optimizer.moments import make_scales, read_moment, write_moment

EXP_AVG, EXP_AVG_SQ, REMAINDER, STEP = "exp_avg", "exp_avg_sq", "param_remainder", "step"


class FlatState:
    """State of a group, which it references weakly; all zeros at first.

    Args:
        keeps_remainder: the main weights are the upper halves of fp32 ones, whose lower halves are kept here.
        dtypes: those of the two moments.

    Attributes:
        views: [T] state of each parameter by key, as DTensors that are placed like the parameter. Moments with scales are shown in
            fp32, between ``complete`` and ``shrink`` only.
    """

    def __init__(
        self,
        group: FsdpParameterGroup,
        *,
        keeps_remainder: bool,
        dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
    ) -> None:
        self.group = weakref.ref(group)
        main = group.weights.main.local
        self._flat: dict[str, torch.Tensor] = {}
        self._scales: dict[str, torch.Tensor] = {}
        self.views: list[dict[str, DTensor]] = [{} for _ in group.sharded]
        for key, dtype in zip((EXP_AVG, EXP_AVG_SQ), dtypes, strict=True):
            self._flat[key] = self._zeros(main, dtype)
            scales = make_scales(self._flat[key], len(group.sharded))
            if scales is None:
                self._show(group, key, self._flat[key])
            else:
                self._scales[key] = scales
        self._read: dict[str, torch.Tensor] = {}  # moments with scales, while they are shown
        self.remainder: torch.Tensor | None = None
        if keeps_remainder:
            self.remainder = self._flat[REMAINDER] = self._zeros(main, torch.int16)
            self._show(group, REMAINDER, self.remainder)
        group.note_state(on_device=sum(flat.numel() * flat.element_size() for flat in self.buffers))
        self._runs: tuple[Run, ...] = ()
        self._blocks: torch.Tensor | None = None
        self._seen_version = 0
        self.note_version(group)

    def _zeros(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros_like(like, dtype=dtype, memory_format=torch.contiguous_format)

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The memory of the state, without what ``complete`` makes."""
        return [*self._flat.values(), *self._scales.values()]

    @property
    def completed_keys(self) -> list[str]:
        """The keys that views have between ``complete`` and ``shrink`` only."""
        return list(self._scales)

    def _show(self, group: FsdpParameterGroup, key: str, flat: torch.Tensor) -> None:
        """Show ``flat`` as state under ``key``, with views by parameter."""
        for index, (parameter, views) in enumerate(zip(group.sharded, self.views, strict=True)):
            views[key] = view_like(parameter, flat, group, index)

    def lay_out(
        self, group: FsdpParameterGroup, table_rows: Sequence[int], only: Sequence[bool], update: AdamWUpdate
    ) -> None:
        """Prepare updates of tensor ``t``, if ``only[t]``, with the coefficients in row ``table_rows[t]``."""
        by_tensor = group.weights.codec.encodes_by_tensor or bool(self._scales)
        self._runs = tuple(runs_of(group.weights.main, table_rows, only, by_tensor=by_tensor))
        self._blocks = update.blocks(self._runs, group.device)

    def shard(self, group: FsdpParameterGroup) -> FlatShard:
        """Return the buffers of an update, where they are now: weights may have moved since the last one."""
        return FlatShard(
            # ``.data`` has its own version counter, so autograd does not take weights that it saved for modified.
            main=group.weights.main.local.data,
            exp_avg=self._flat[EXP_AVG],
            exp_avg_sq=self._flat[EXP_AVG_SQ],
            remainder=self.remainder,
            model=group.weights.piece_of_update,
            runs=self._runs,
            blocks=self._blocks,
            exp_avg_scales=self._scales.get(EXP_AVG),
            exp_avg_sq_scales=self._scales.get(EXP_AVG_SQ),
        )

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def main_weights(self, group: FsdpParameterGroup, index: int) -> DTensor:
        """Return the main weights of parameter ``index`` in fp32; a copy if they are not fp32."""
        parameter, remainder = group.sharded[index].detach(), self.views[index].get(REMAINDER)
        if remainder is None:
            return parameter.float()  # type: ignore[return-value]
        return placed_like(parameter, join(parameter._local_tensor, remainder._local_tensor))  # type: ignore[arg-type, attr-defined]

    def complete(self, group: FsdpParameterGroup) -> None:
        """Make the state that is made only when it is asked for: moments with scales, in fp32."""
        for key, scales in self._scales.items():
            stored = self._flat[key]
            self._read[key] = whole = self._zeros(stored, torch.float32)
            for run in self._runs_of_tensors(group):
                whole[run.begin : run.end] = read_moment(stored, scales, run)
            self._show(group, key, whole)

    def shrink(self) -> None:
        """Give back the memory of what ``complete`` has made."""
        for key in self.completed_keys:
            self._read.pop(key, None)
            for views in self.views:
                views.pop(key, None)

    def adopt(self, group: FsdpParameterGroup) -> None:
        """Go on from what was read into the views, which are complete, and the main weights."""
        for key, whole in self._read.items():
            for run in self._runs_of_tensors(group):
                own = whole[run.begin : run.end]
                write_moment(self._flat[key], self._scales[key], run, own, is_square=key == EXP_AVG_SQ)
        self.shrink()
        self.note_version(group)

    def _runs_of_tensors(self, group: FsdpParameterGroup) -> list[Run]:
        return runs_of(group.weights.main, [0] * len(group.sharded), by_tensor=True)

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


class HostState(FlatState):
    """State of a group, in the host's memory; the device keeps the main weights as the engine holds them.

    Args:
        keeps_remainder: the engine's main weights are the upper halves of the fp32 ones; the lower halves are then state for
            checkpoints, made when it is asked for.
        pin_memory: main weights are in page-locked memory, from which the device copies by itself.

    Attributes:
        whole: [N] fp32 main weights.
    """

    def __init__(self, group: FsdpParameterGroup, *, keeps_remainder: bool, pin_memory: bool) -> None:
        pins = pin_memory and group.device.type == "cuda"
        self._splits = keeps_remainder
        self.whole = torch.zeros(group.weights.main.local.shape, dtype=torch.float32, device="cpu", pin_memory=pins)
        super().__init__(group, keeps_remainder=False)
        group.note_state(on_host=sum(flat.nbytes for flat in (*self.buffers, self.whole)))
        self._seen = (-1, -1)
        self.drop_stale_remainder(group)

    def _zeros(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(like.shape, dtype=dtype, device="cpu")

    @property
    def completed_keys(self) -> list[str]:
        return [REMAINDER] if self._splits else []

    def shard(self, group: FsdpParameterGroup) -> FlatShard:
        shard = super().shard(group)
        shard.main, shard.model = self.whole, None
        return shard

    # ---- between host and device --------------------------------------------------------------------------------

    def upload(self, group: FsdpParameterGroup) -> None:
        """Copy the main weights to the device, and to the model weight, on the current stream; the host need not wait."""
        # The host next writes ``whole`` when a later gradient has arrived, whose forward has waited for this copy.
        weights = group.weights
        main = weights.main.local.data
        if self._splits:
            round_up_half(self.whole.to(main.device, non_blocking=True, copy=True), main)
        else:
            main.copy_(self.whole, non_blocking=True)
        if weights.piece_of_update is not None:
            weights.piece_of_update.copy_(main)

    def drop_stale_remainder(self, group: FsdpParameterGroup) -> None:
        """Read the main weights from the device if anything but this optimizer has written to them. Blocks the host then."""
        if (group.weights.freshness.write_count, group.weights.freshness.num_loads) != self._seen:
            self.whole.copy_(group.weights.main.local)
            self.note_version(group)

    def note_version(self, group: FsdpParameterGroup) -> None:
        # Loads may write where no version counter sees it.
        self._seen = (group.weights.freshness.write_count, group.weights.freshness.num_loads)

    def main_weights(self, group: FsdpParameterGroup, index: int) -> DTensor:
        """Return a copy of the main weights of parameter ``index``, on the host."""
        self.drop_stale_remainder(group)
        return view_like(group.sharded[index], self.whole.clone(), group, index)

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def complete(self, group: FsdpParameterGroup) -> None:
        """Show the lower halves of the main weights as they are now, as ``FlatState`` has them."""
        if not self._splits:
            return
        self.drop_stale_remainder(group)
        high = group.weights.main.local.cpu()
        lower = self.whole.view(torch.int32) - (high.view(torch.int16).int() << 16)
        self._read[REMAINDER] = lower.short()
        self._show(group, REMAINDER, self._read[REMAINDER])

    def adopt(self, group: FsdpParameterGroup) -> None:
        """Take the main weights as they were loaded: those of the device, and lower halves that ``complete`` showed."""
        remainder = self._read.get(REMAINDER)
        high = group.weights.main.local
        self.whole.copy_(high if remainder is None else join(high.cpu(), remainder))
        self.note_version(group)
        self.shrink()


def view_like(parameter: torch.Tensor, flat: torch.Tensor, group: FsdpParameterGroup, index: int) -> DTensor:
    assert isinstance(parameter, DTensor)
    own = group.weights.main.view(index)
    begin = own.storage_offset() - group.weights.main.local.storage_offset()
    return placed_like(parameter, flat[begin : begin + own.numel()].view(own.shape))
