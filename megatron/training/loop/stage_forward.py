"""The forward of a microbatch on this rank's part of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.core.pipeline_parallel import PipelineStage

Batch = dict[str, Tensor]
ForwardStep = Callable[[Batch, torch.nn.Module], tuple[Tensor, Tensor] | Tensor]
"""(microbatch, model) -> ([] sum of the losses of the tokens that count, [] how many they are), fp32, on the device. On a
pipeline stage that has no output layer (``has_output_layer``): what the model returned, [s, b, h]."""


def has_output_layer(model: torch.nn.Module) -> bool:
    """True if the model, wrapped or not, computes losses: it is whole, or its pipeline's last stage."""
    return bool(getattr(_unwrapped(model), "post_process", True))


class StageForward:
    """Runs ``forward_step`` on a stage.

    Args:
        model: wrapped or not; where it is not the first stage it has ``set_input_tensor``.

    Raises:
        TypeError: the model of a later stage cannot be given hidden states.
    """

    def __init__(self, model: torch.nn.Module, forward_step: ForwardStep, stage: PipelineStage) -> None:
        self.model, self.forward_step, self.stage = model, forward_step, stage
        self._set_input: Callable[[Tensor | None], None] | None = None
        if not stage.is_first:
            self._set_input = getattr(_unwrapped(model), "set_input_tensor", None)
            if self._set_input is None:
                raise TypeError(
                    f"the model of a later pipeline stage must have set_input_tensor(), got {type(_unwrapped(model)).__name__} on "
                    f"stage {stage.index}"
                )

    def __call__(self, batch: Batch, hidden_states: Tensor | None) -> tuple[Tensor, Tensor] | Tensor:
        """As ``ForwardStep``.

        Args:
            hidden_states: [s, b, h] from the stage before; None on the first one.

        Raises:
            TypeError: ``forward_step`` returned something else than the stage needs.
        """
        if self._set_input is None:
            return self._checked(self.forward_step(batch, self.model))
        self._set_input(hidden_states)
        try:
            return self._checked(self.forward_step(batch, self.model))
        finally:
            self._set_input(None)  # its memory belongs to the schedule

    def _checked(self, output: Any) -> tuple[Tensor, Tensor] | Tensor:
        if isinstance(output, Tensor) is self.stage.is_last:
            must = "a pair (sum of losses, tokens)" if self.stage.is_last else "the model's output, one tensor,"
            raise TypeError(
                f"forward_step must return {must} on stage {self.stage.index} of {self.stage.num_stages}, got "
                f"{type(output).__name__}; see has_output_layer"
            )
        return output  # type: ignore[no-any-return]


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    while isinstance(inner := getattr(model, "module", None), torch.nn.Module):
        model = inner
    return model
