"""Optimizers of bitsandbytes on sharded parameters: they step on the rows that this rank holds.

Their kernels are custom operations that know no DTensor. Their 8-bit state is a code for each element and a scale for each block of
256 elements of this rank's rows, which means nothing on other ranks; so state dicts and checkpoints hold its values, in fp32 and placed like
the parameter. A value that is read, written and read again is the same up to fp32's rounding.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.foreign_optimizers.fused_adam import placed

_BLOCK_NUMEL = 256


def prepare_bitsandbytes(optimizer: Any, groups: Sequence[FsdpParameterGroup]) -> None:
    """Let an optimizer of bitsandbytes step on parameters of these groups; other optimizers are left alone, a prepared one too.

    Raises:
        NotImplementedError: it needs norms of whole tensors, or its state has another shape than the parameter.
    """
    cls: Any = type(optimizer)
    base: Any = next((c for c in cls.__mro__ if c.__module__ == "bitsandbytes.optim.optimizer"), None)
    if base is None or not groups or isinstance(optimizer, BitsandbytesOnRows):
        return
    if optimizer.args.max_unorm > 0:
        raise NotImplementedError(
            f"bitsandbytes' {cls.__name__} must have max_unorm=0, got {optimizer.args.max_unorm}: it needs norms of whole tensors, of "
            f"which ranks hold rows ({groups[0]}); use AdamW8bit or Lion8bit"
        )
    if cls.init_state is not base.init_state:
        raise NotImplementedError(
            f"bitsandbytes' {cls.__name__} is not served: its state has another shape than its parameters, got {groups[0]}; use AdamW8bit"
        )
    # Under the same name, which checkpoints compare.
    optimizer.__class__ = type(cls.__name__, (BitsandbytesOnRows, cls), {"__module__": cls.__module__})


class BitsandbytesOnRows(torch.optim.Optimizer if TYPE_CHECKING else object):  # type: ignore[misc]
    """What changes in an optimizer of bitsandbytes whose parameters are sharded."""

    state: Any

    # ---- a step -------------------------------------------------------------------------------------------------

    def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        """Decide by the whole parameter whether its state is in 8 bits, so that all ranks decide the same."""
        config: dict[str, Any] = super().get_config(gindex, pindex, group)
        whole = self.param_groups[gindex]["params"][pindex]
        config["min_8bit_size"] = 0 if whole.numel() >= config["min_8bit_size"] else sys.maxsize
        return config

    def init_state(self, group: dict[str, Any], p: torch.Tensor, gindex: int, pindex: int) -> None:
        """Make the state of this rank's rows."""
        with self._rows_of(p) as rows:
            super().init_state(group, rows, gindex, pindex)

    def update_step(self, group: dict[str, Any], p: torch.Tensor, gindex: int, pindex: int) -> None:
        """Update this rank's rows."""
        with self._rows_of(p) as rows:
            if rows.numel():
                super().update_step(group, rows, gindex, pindex)
            else:  # a kernel without elements cannot be launched
                self.state[p]["step"] += 1

    @contextmanager
    def _rows_of(self, parameter: torch.Tensor) -> Iterator[torch.Tensor]:
        """Lend this rank's rows the parameter's state and gradient."""
        if not isinstance(parameter, DTensor):
            yield parameter
            return
        rows = parameter._local_tensor.detach()
        if parameter.grad is not None:
            rows.grad = parameter.grad._local_tensor  # type: ignore[attr-defined]
        self.state[rows] = self.state[parameter]
        try:
            yield rows
        finally:
            del self.state[rows]

    # ---- state dicts and checkpoints ----------------------------------------------------------------------------

    def decoded_dtypes(self, parameter: torch.Tensor) -> dict[str, torch.dtype]:
        """Return the dtypes of the state's tensors by name, also of a parameter that has no state yet."""
        has_two = any(cls.__name__ == "Optimizer2State" for cls in type(self).__mro__)
        return dict.fromkeys(("state1", "state2") if has_two else ("state1",), torch.float32)

    def decoded_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return a parameter's state by name: tensors in fp32, placed like the parameter, and the count of steps."""
        own = self.state.get(parameter)
        if not own:
            return {}
        state: dict[str, Any] = {"step": own["step"]}
        for key in self.decoded_dtypes(parameter):
            values = own[key]
            if values.dtype == torch.uint8:
                number = key[-1]
                values = _decoded(values, own[f"qmap{number}"], own[f"absmax{number}"])
            state[key] = placed(parameter, values)
        return state

    def set_decoded_state(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Replace a parameter's state by what ``decoded_state`` returned, on any number of ranks."""
        places = (
            (gindex, pindex, group)
            for gindex, group in enumerate(self.param_groups)
            for pindex, own in enumerate(group["params"])
            if own is parameter
        )
        gindex, pindex, group = next(places)
        self.state[parameter] = {}
        self.init_state(group, parameter, gindex, pindex)
        own = self.state[parameter]
        own["step"] = int(state["step"])
        for key in self.decoded_dtypes(parameter):
            values = state[key]._local_tensor if isinstance(state[key], DTensor) else state[key]
            if own[key].dtype == torch.uint8:
                number = key[-1]
                _encode(values, own[key], own[f"qmap{number}"], own[f"absmax{number}"])
            else:
                own[key].copy_(values)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as values that any number of ranks loads: fp32 DTensors, placed like the parameters."""
        own: Any = self.state
        self.state = {parameter: self.decoded_state(parameter) for parameter in own}
        try:
            return torch.optim.Optimizer.state_dict(self)
        finally:
            self.state = own

    def load_state_dict(self, state_dict: dict[str, Any], move_to_device: bool = True) -> None:
        """Load what ``state_dict`` returned."""
        torch.optim.Optimizer.load_state_dict(self, {**state_dict, "state": {}})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            if state_dict["state"].get(number):
                self.set_decoded_state(parameter, state_dict["state"][number])


def _decoded(codes: torch.Tensor, values_of_codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the fp32 values of 8-bit codes [shape], scaled in blocks of the flat tensor."""
    scale = scales.repeat_interleave(_BLOCK_NUMEL)[: codes.numel()]
    return values_of_codes[codes.flatten().int()].mul_(scale).view(codes.shape)


def _encode(values: torch.Tensor, codes: torch.Tensor, values_of_codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Write the codes [shape] and scales [blocks] of fp32 values [shape], so that those which were decoded get their codes again."""
    if not values.numel():
        return
    flat = values.flatten()
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % _BLOCK_NUMEL)).view(-1, _BLOCK_NUMEL)
    # The largest value has the last code, or the first one if it is negative, which stands for a little less than 1.
    highest, lowest = blocks.amax(1) / values_of_codes[-1], -blocks.amin(1)
    if values_of_codes[0] < 0:
        lowest = lowest / -values_of_codes[0]
    scales.copy_(torch.maximum(highest, lowest))
    normalised = blocks / scales.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(1)
    middles = (values_of_codes[1:] + values_of_codes[:-1]) / 2
    nearest = torch.bucketize(normalised, middles).flatten()[: flat.numel()]
    codes.copy_(nearest.view(codes.shape))
