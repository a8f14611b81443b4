"""The forward of a microbatch on this rank's part of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


class SharedBatches:
    """The microbatches of a step or an evaluation, each of which all stages of this rank compute.

    Args:
        batches: iterator over the microbatches, in order.
        num_stages: stages of this rank.
    """

    def __init__(self, batches: Iterator[Batch], num_stages: int) -> None:
        self._batches, self._num_stages = batches, num_stages
        self._held: dict[int, tuple[Batch, int]] = {}  # with the number of stages that have not had it

    def __getitem__(self, index: int) -> Batch:
        """Return a microbatch; each stage asks for each one once, in order."""
        if index not in self._held:
            batch = next(self._batches)
            if self._num_stages == 1:
                return batch
            self._held[index] = batch, self._num_stages
        batch, missing = self._held.pop(index)
        if missing > 1:
            self._held[index] = batch, missing - 1
        return batch


def stages_of_rank(
    model: torch.nn.Module, forward_step: ForwardStep, stage: PipelineStage
) -> list[tuple[torch.nn.Module, StageForward]]:
    """Return the models of this rank's stages, each with the call of ``forward_step`` on it.

    Raises:
        ValueError: the model has another number of stages.
    """
    models = list(getattr(model, "model_chunks", [model]))
    if len(models) != stage.num_chunks:
        raise ValueError(f"the model must have the {stage.num_chunks} stages of its rank, got {len(models)}")
    return [(own, StageForward(own, forward_step, of)) for own, of in zip(models, stage.of_chunks, strict=True)]


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
