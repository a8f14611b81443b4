"""The forward of a microbatch on this rank's part of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.core.pipeline_parallel import PipelineStage

Batch = dict[str, Tensor]
ForwardStep = Callable[[Batch, torch.nn.Module], tuple[Tensor, Tensor] | Tensor]
"""(microbatch, model) -> ([] sum of the losses of the unmasked tokens, [] their number), fp32, on the device. On a pipeline
stage without output layer (``has_output_layer``): the model's output, [s, b, h]."""


def has_output_layer(model: torch.nn.Module) -> bool:
    """Return whether the model, wrapped or not, computes losses: it is not split into stages, or it is the last one."""
    return bool(getattr(_unwrapped(model), "post_process", True))


class StageForward:
    """The call of ``forward_step`` on a pipeline stage.

    Args:
        model: wrapped or not; on stages other than the first it must have ``set_input_tensor``.

    Raises:
        TypeError: the model of a later stage has no ``set_input_tensor``.
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
        """Run ``forward_step`` and return its result.

        Args:
            hidden_states: [s, b, h] of the previous stage; None on the first one.

        Raises:
            TypeError: ``forward_step`` returned another kind of result than the stage needs.
        """
        if self._set_input is None:
            return self._checked(self.forward_step(batch, self.model))
        self._set_input(hidden_states)
        try:
            return self._checked(self.forward_step(batch, self.model))
        finally:
            self._set_input(None)  # so that the schedule can free its memory

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
