"""Execution of the schedule of a rank with several pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.core.pipeline_parallel.interleaved_schedule import (
    interleaved_forwards_only,
    interleaved_one_forward_one_backward,
)
from megatron.core.pipeline_parallel.p2p_communication import InterleavedCommunicator, PipelineStage
from megatron.core.pipeline_parallel.pipeline import ForwardComputation, Pipeline, StageComputation, gradient_of
from megatron.core.pipeline_parallel.stage_schedules import Act, Message

if TYPE_CHECKING:
    from megatron.core.model_parallel_config import ModelParallelConfig


class InterleavedPipeline:
    """The interleaved 1F1B execution of a rank's stages.

    Args:
        stage: its ``num_chunks`` says how many stages the rank has.
        group_size: microbatches that run through a stage before the next one's turn; None: as many as ranks.
        overlaps: messages travel beside what is computed meanwhile.

    Ranks: all of the pipeline, with the same number of microbatches.
    """

    def __init__(self, stage: PipelineStage, *, group_size: int | None = None, overlaps: bool = True) -> None:
        self.stage, self.group_size = stage, group_size or stage.num_stages
        self._communicator = InterleavedCommunicator(stage, overlaps=overlaps)

    def forward_backward(self, computations: Sequence[StageComputation], num_microbatches: int) -> None:
        """Run forward and backward of every microbatch on each of this rank's stages.

        Args:
            computations: [C] those of the stages, in the order of their layers.

        Raises:
            ValueError: there are too few microbatches for the ranks or the groups.
        """
        stages, communicator = self.stage.of_chunks, self._communicator
        schedule = interleaved_one_forward_one_backward(
            self.stage.index,
            num_ranks=self.stage.num_stages,
            num_chunks=self.stage.num_chunks,
            num_microbatches=num_microbatches,
            group_size=self.group_size,
        )
        in_flight: dict[tuple[int, int], tuple[Tensor | None, GradientEdge]] = {}
        communicator.connect()
        for act, exchange in schedule:
            made: Tensor | None = None
            if act is None:
                pass
            elif act.is_forward:
                hidden_states = None if stages[act.chunk].is_first else self._take("output", act).requires_grad_()
                output = computations[act.chunk].forward(act.microbatch, hidden_states)
                in_flight[act.chunk, act.microbatch] = hidden_states, get_gradient_edge(output)
                made = output.detach()
                del output, hidden_states
            else:
                gradient = None if stages[act.chunk].is_last else self._take("gradient", act)
                hidden_states, edge = in_flight.pop((act.chunk, act.microbatch))
                computations[act.chunk].backward(act.microbatch, edge, gradient)
                made = None if hidden_states is None else gradient_of(hidden_states, act.microbatch)
                del edge, hidden_states, gradient  # frees the graph before the next act
            communicator.begin(exchange, made)
        communicator.finish()

    @torch.no_grad()
    def forward_only(self, computations: Sequence[ForwardComputation], num_microbatches: int) -> None:
        """Run forward of every microbatch on each of this rank's stages, without autograd."""
        stages, communicator = self.stage.of_chunks, self._communicator
        schedule = interleaved_forwards_only(
            self.stage.index,
            num_ranks=self.stage.num_stages,
            num_chunks=self.stage.num_chunks,
            num_microbatches=num_microbatches,
            group_size=self.group_size,
        )
        communicator.connect()
        for act, exchange in schedule:
            made: Tensor | None = None
            if act is not None:
                hidden_states = None if stages[act.chunk].is_first else self._take("output", act)
                made = computations[act.chunk].forward(act.microbatch, hidden_states)
            communicator.begin(exchange, made)
        communicator.finish()

    def _take(self, kind: str, act: Act) -> Tensor:
        message = Message("output" if kind == "output" else "gradient", act.microbatch, act.chunk)
        return self._communicator.take(message)


class StagePipeline:
    """The execution of all of a rank's stages, whether it has one (1F1B) or several (interleaved 1F1B).

    Args:
        config: the model's; says how interleaved stages take turns. None: as by default.
    """

    def __init__(self, stage: PipelineStage, config: ModelParallelConfig | None = None) -> None:
        self._plain: Pipeline | None = None
        if stage.num_chunks == 1:
            self._plain = Pipeline(stage)
        elif config is None:
            self._interleaved = InterleavedPipeline(stage)
        else:
            self._interleaved = InterleavedPipeline(
                stage, group_size=config.microbatch_group_size_per_vp_stage, overlaps=config.overlap_p2p_comm
            )

    def forward_backward(self, computations: Sequence[StageComputation], num_microbatches: int) -> None:
        """Run forward and backward of every microbatch on each of this rank's stages."""
        if self._plain is None:
            self._interleaved.forward_backward(computations, num_microbatches)
        else:
            (computation,) = computations
            self._plain.forward_backward(computation, num_microbatches)

    def forward_only(self, computations: Sequence[ForwardComputation], num_microbatches: int) -> None:
        """Run forward of every microbatch on each of this rank's stages, without autograd."""
        if self._plain is None:
            self._interleaved.forward_only(computations, num_microbatches)
        else:
            (computation,) = computations
            self._plain.forward_only(computation, num_microbatches)
