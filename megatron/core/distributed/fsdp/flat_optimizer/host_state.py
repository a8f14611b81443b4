"""AdamW's state of a parameter group in the host's memory, with the main weights in fp32."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.flat_optimizer.adamw_update import FlatShard, join, round_up_half
from megatron.core.distributed.fsdp.flat_optimizer.flat_state import (
    EXP_AVG,
    EXP_AVG_SQ,
    REMAINDER,
    FlatState,
    view_like,
)


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
        group.note_state(on_host=sum(flat.nbytes for flat in (*self._flat.values(), self.whole)))
        self._seen = (-1, -1)
        self.drop_stale_remainder(group)

    def _zeros(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(like.shape, dtype=dtype, device="cpu")

    def _make_shard(self, group: FsdpParameterGroup) -> None:
        self._addresses = (group.weights.main.local.data_ptr(), group.weights.model.local.data_ptr())
        self._shard = FlatShard(
            main=self.whole,
            exp_avg=self._flat[EXP_AVG],
            exp_avg_sq=self._flat[EXP_AVG_SQ],
            remainder=None,
            model=None,
            runs=self._runs,
            blocks=None,
        )

    # ---- between host and device --------------------------------------------------------------------------------

    def upload(self, group: FsdpParameterGroup) -> None:
        """Copy the main weights to the device, and to the model weight, on the current stream; the host need not wait."""
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

    def main_weights(self, group: FsdpParameterGroup, parameter: torch.Tensor) -> DTensor:
        """Return a copy of the parameter's main weights, on the host."""
        self.drop_stale_remainder(group)
        index = next(i for i, one in enumerate(group.sharded) if one is parameter)
        return view_like(parameter, self.whole.clone(), group, index)

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def complete(self, group: FsdpParameterGroup) -> None:
        """Show the lower halves of the main weights as they are now, as ``FlatState`` has them."""
        if not self._splits:
            return
        self.drop_stale_remainder(group)
        high = group.weights.main.local.cpu()
        lower = self.whole.view(torch.int32) - (high.view(torch.int16).int() << 16)
        self._show(group, REMAINDER, lower.short())

    def shrink(self) -> None:
        """Give back the memory of what ``complete`` has made."""
        for views in self.views:
            views.pop(REMAINDER, None)
        self._flat.pop(REMAINDER, None)

    def adopt(self, group: FsdpParameterGroup) -> None:
        """Take the main weights as they were loaded: those of the device, and lower halves that ``complete`` showed."""
        remainder = self._flat.get(REMAINDER)
        high = group.weights.main.local
        self.whole.copy_(high if remainder is None else join(high.cpu(), remainder))
        self.note_version(group)
        self.shrink()
