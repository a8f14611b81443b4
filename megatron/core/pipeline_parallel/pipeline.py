"""Execution of a stage's schedule: forwards, backwards and the exchanges between them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.core.pipeline_parallel.p2p_communication import PipelineCommunicator, PipelineStage
from megatron.core.pipeline_parallel.stage_schedules import forwards_only, one_forward_one_backward

if TYPE_CHECKING:
    from megatron.core.transformer.moe.alternating_passes import AlternatingPasses


class ForwardComputation(Protocol):
    """The computation of a stage for a microbatch of an evaluation."""

    def forward(self, microbatch: int, hidden_states: Tensor | None) -> Tensor:
        """Compute hidden states [s, b, h] for the next stage, or on the last stage the loss [] for backward.

        Args:
            hidden_states: [s, b, h] of the previous stage; None on the first one.
        """


class StageComputation(ForwardComputation, Protocol):
    """The computation of a stage for a microbatch of a training step."""

    def backward(self, microbatch: int, output: GradientEdge, gradient: Tensor | None) -> None:
        """Add this microbatch's gradients to those of the weights and of the forward's ``hidden_states``.

        Args:
            output: the place of forward's result in the autograd graph (``torch.autograd.backward`` takes it).
            gradient: [s, b, h] gradient of the output; None on the last stage, whose output is the loss.
        """


class Pipeline:
    """The 1F1B execution of one stage; without pipelining, one microbatch after the other.

    Args:
        passes: lets the forward of a microbatch and the backward of the one before take turns, where there is one stage; None:
            each runs by itself.

    Ranks: all of the pipeline, each with its stage and the same number of microbatches.
    """

    def __init__(self, stage: PipelineStage, passes: AlternatingPasses | None = None) -> None:
        self.stage, self._passes = stage, passes
        self._communicator = PipelineCommunicator(stage)

    def forward_backward(self, computation: StageComputation, num_microbatches: int) -> None:
        """Run forward and backward of every microbatch on this stage.

        Between its forward and its backward a microbatch keeps its graph and the received hidden states. The memory of the
        sent ones is freed after the send.
        """
        stage = self.stage
        if self._passes is not None:
            self._take_turns(self._passes, computation, num_microbatches)
            return
        schedule = one_forward_one_backward(stage.index, stage.num_stages, num_microbatches)
        in_flight: dict[int, tuple[Tensor | None, GradientEdge]] = {}
        self._communicator.connect()
        made: Tensor | None = None
        for exchange, act in zip(schedule.exchanges, schedule.acts, strict=False):
            arrived = self._communicator.exchange(exchange, made)
            made = None
            if act.is_forward:
                hidden_states = arrived.requires_grad_() if arrived is not None else None
                output = computation.forward(act.microbatch, hidden_states)
                in_flight[act.microbatch] = hidden_states, get_gradient_edge(output)
                made = output.detach()
                del output
            else:
                hidden_states, edge = in_flight.pop(act.microbatch)
                computation.backward(act.microbatch, edge, arrived)
                made = None if hidden_states is None else gradient_of(hidden_states, act.microbatch)
                del edge  # frees the graph before the next act
            del hidden_states, arrived
        self._communicator.exchange(schedule.exchanges[-1], made)
        self._communicator.finish()

    def _take_turns(self, passes: AlternatingPasses, computation: StageComputation, num_microbatches: int) -> None:
        """Run each forward but the first one together with the backward of the microbatch before, on the only stage."""
        waiting: list[GradientEdge] = []

        def forward(microbatch: int) -> None:
            waiting.append(get_gradient_edge(computation.forward(microbatch, None)))

        def backward(microbatch: int) -> None:
            computation.backward(microbatch, waiting.pop(0), None)

        forward(0)
        for microbatch in range(1, num_microbatches):
            passes.run(partial(forward, microbatch), partial(backward, microbatch - 1))
        backward(num_microbatches - 1)

    @torch.no_grad()
    def forward_only(self, computation: ForwardComputation, num_microbatches: int) -> None:
        """Run forward of every microbatch on this stage, without autograd."""
        stage = self.stage
        schedule = forwards_only(stage.index, stage.num_stages, num_microbatches)
        self._communicator.connect()
        made: Tensor | None = None
        for exchange, act in zip(schedule.exchanges, schedule.acts, strict=False):
            made = computation.forward(act.microbatch, self._communicator.exchange(exchange, made))
        self._communicator.exchange(schedule.exchanges[-1], made)
        self._communicator.finish()


def gradient_of(hidden_states: Tensor, microbatch: int) -> Tensor:
    """Return the gradient of a stage's input after its backward."""
    if hidden_states.grad is None:
        raise RuntimeError(
            f"a stage's output must depend on its input, got no gradient of microbatch {microbatch}'s hidden states; the "
            "model must start from the tensor of set_input_tensor"
        )
    return hidden_states.grad
