"""Execution of the schedule of a rank with several pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.core.pipeline_parallel.interleaved_schedule import (
    HalfTick,
    InterleavedSchedule,
    interleaved_forwards_only,
    interleaved_one_forward_one_backward,
)
from megatron.core.pipeline_parallel.p2p_communication import InterleavedCommunicator, PipelineStage
from megatron.core.pipeline_parallel.pipeline import ForwardComputation, Pipeline, StageComputation, gradient_of
from megatron.core.pipeline_parallel.stage_schedules import Act, Message

if TYPE_CHECKING:
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.transformer.moe.alternating_passes import AlternatingPasses


class InterleavedPipeline:
    """The interleaved 1F1B execution of a rank's stages.

    Args:
        stage: its ``num_chunks`` says how many stages the rank has.
        group_size: microbatches that run through a stage before the next one's turn; None: as many as ranks.
        overlaps: messages travel beside what is computed meanwhile.
        passes: lets the forward and the backward of a tick take turns; None: each runs by itself.

    Ranks: all of the pipeline, with the same number of microbatches.
    """

    def __init__(
        self,
        stage: PipelineStage,
        *,
        group_size: int | None = None,
        overlaps: bool = True,
        passes: AlternatingPasses | None = None,
    ) -> None:
        self.stage, self.group_size, self._passes = stage, group_size or stage.num_stages, passes
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
            are_independent=self._passes is not None,
        )
        in_flight: dict[tuple[int, int], tuple[Tensor | None, GradientEdge]] = {}

        def forward(act: Act, hidden_states: Tensor | None) -> Tensor:
            output = computations[act.chunk].forward(act.microbatch, hidden_states)
            in_flight[act.chunk, act.microbatch] = hidden_states, get_gradient_edge(output)
            return output.detach()

        def backward(act: Act, gradient: Tensor | None) -> Tensor | None:
            hidden_states, edge = in_flight.pop((act.chunk, act.microbatch))
            computations[act.chunk].backward(act.microbatch, edge, gradient)
            return None if hidden_states is None else gradient_of(hidden_states, act.microbatch)

        def given(act: Act) -> Tensor | None:
            if act.is_forward:
                return None if stages[act.chunk].is_first else self._take("output", act).requires_grad_()
            return None if stages[act.chunk].is_last else self._take("gradient", act)

        communicator.connect()
        for halves in self._together(schedule):
            runs = [
                None if act is None else partial(forward if act.is_forward else backward, act, given(act))
                for act, *_ in halves
            ]
            made = self._results(runs)
            del runs  # frees the graph before the next act
            for half, result in zip(halves, made, strict=True):
                communicator.begin(half.exchange, result)
        communicator.finish()

    def _together(self, schedule: InterleavedSchedule) -> Iterator[Sequence[HalfTick]]:
        """Group the halves of the schedule that run together: the two acts of a tick where passes take turns, else each by itself."""
        for _, of_tick in groupby(schedule, key=attrgetter("tick")):
            halves = tuple(of_tick)
            if self._passes is not None and len(halves) == 2 and None not in (half.act for half in halves):
                yield halves
            else:
                yield from ((half,) for half in halves)

    def _results(self, runs: Sequence[Callable[[], Tensor | None] | None]) -> list[Tensor | None]:
        """Run an act, or a forward and a backward that take turns, and return what they make."""
        if len(runs) == 1:
            return [None if run is None else run() for run in runs]
        forward, backward = runs
        assert self._passes is not None and forward is not None and backward is not None, "grouped so"
        gradients: list[Tensor | None] = []
        output = self._passes.run(forward, lambda: gradients.append(backward()))
        return [output, *gradients]

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
        for act, exchange, _ in schedule:
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
        passes: lets a forward and a backward take turns; None: each runs by itself.
    """

    def __init__(
        self,
        stage: PipelineStage,
        config: ModelParallelConfig | None = None,
        passes: AlternatingPasses | None = None,
    ) -> None:
        self._plain: Pipeline | None = None
        if stage.num_chunks == 1:
            self._plain = Pipeline(stage, passes)
        elif config is None:
            self._interleaved = InterleavedPipeline(stage, passes=passes)
        else:
            self._interleaved = InterleavedPipeline(
                stage,
                group_size=config.microbatch_group_size_per_vp_stage,
                overlaps=config.overlap_p2p_comm,
                passes=passes,
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
