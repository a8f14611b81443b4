"""Runs a stage's schedule: forwards and backwards in its order, with exchanges between them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.core.pipeline_parallel.p2p_communication import PipelineCommunicator, PipelineStage
from megatron.core.pipeline_parallel.schedules import forwards_only, one_forward_one_backward


class ForwardComputation(Protocol):
    """What a stage computes for a microbatch of an evaluation."""

    def forward(self, microbatch: int, hidden_states: Tensor | None) -> Tensor:
        """Hidden states [s, b, h] for the next stage; on the last one the loss [] that backward starts from.

        Args:
            hidden_states: [s, b, h] from the stage before; None on the first one.
        """


class StageComputation(ForwardComputation, Protocol):
    """What a stage computes for a microbatch of a step."""

    def backward(self, microbatch: int, output: GradientEdge, gradient: Tensor | None) -> None:
        """The weights' gradients, and that of the forward's ``hidden_states``, have grown by this microbatch's.

        Args:
            output: where what ``forward`` returned lies in the graph (``torch.autograd.backward`` takes it).
            gradient: [s, b, h] that of the output; None on the last stage, whose output is the loss.
        """


class Pipeline:
    """The forwards and backwards of steps on one stage, 1F1B; without pipelining, one microbatch after the other.

    Ranks: all of the pipeline, each with its stage and as many microbatches.
    """

    def __init__(self, stage: PipelineStage) -> None:
        self.stage = stage
        self._communicator = PipelineCommunicator(stage)

    def forward_backward(self, computation: StageComputation, num_microbatches: int) -> None:
        """Every microbatch has been through forward and backward on this stage.

        A forward that waits for its backward holds its graph and what it received, not what it sent: that memory is given back
        when it has been sent.
        """
        stage = self.stage
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
                made = None if hidden_states is None else _gradient_of(hidden_states, act.microbatch)
                del edge  # the graph ends here, not with the next act
            del hidden_states, arrived
        self._communicator.exchange(schedule.exchanges[-1], made)
        self._communicator.finish()

    @torch.no_grad()
    def forward_only(self, computation: ForwardComputation, num_microbatches: int) -> None:
        """Every microbatch has been through forward on this stage; nothing was recorded for a backward."""
        stage = self.stage
        schedule = forwards_only(stage.index, stage.num_stages, num_microbatches)
        self._communicator.connect()
        made: Tensor | None = None
        for exchange, act in zip(schedule.exchanges, schedule.acts, strict=False):
            made = computation.forward(act.microbatch, self._communicator.exchange(exchange, made))
        self._communicator.exchange(schedule.exchanges[-1], made)
        self._communicator.finish()


def _gradient_of(hidden_states: Tensor, microbatch: int) -> Tensor:
    if hidden_states.grad is None:
        raise RuntimeError(
            f"a stage's output must depend on what it received, got no gradient of microbatch {microbatch}'s hidden states; the "
            "model must begin with what set_input_tensor was given"
        )
    return hidden_states.grad
