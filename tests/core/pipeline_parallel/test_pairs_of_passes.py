"""Pipelines run each forward together with the right backward where passes take turns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from megatron.core.pipeline_parallel import PipelineStage, StagePipeline
from megatron.core.transformer.moe.alternating_passes import AlternatingPasses


class _Computation:
    """A stage of two steps in each pass, after which it gives the turn."""

    def __init__(self, passes: AlternatingPasses) -> None:
        self.passes, self.log = passes, list[str]()
        self.weight = torch.ones((), requires_grad=True)
        self._outputs: list[Any] = []

    def forward(self, microbatch: int, hidden_states: Tensor | None) -> Tensor:
        self._run(f"F{microbatch}")
        output = self.weight * 2**microbatch
        self._outputs.append(output.grad_fn)
        return output

    def backward(self, microbatch: int, output: GradientEdge, gradient: Tensor | None) -> None:
        assert output.node is self._outputs[microbatch]
        torch.autograd.backward(output, gradient)
        self._run(f"B{microbatch}")

    def _run(self, name: str) -> None:
        for part in "ab":
            self.log.append(name + part)
            self.passes.give_turn()


@pytest.mark.parametrize(
    ("num_microbatches", "expected"),
    [
        (1, "F0a F0b B0a B0b"),
        (2, "F0a F0b F1a B0a F1b B0b B1a B1b"),
        (3, "F0a F0b F1a B0a F1b B0b F2a B1a F2b B1b B2a B2b"),
    ],
)
def test_a_forward_takes_turns_with_the_backward_of_the_microbatch_before(num_microbatches: int, expected: str) -> None:
    passes = AlternatingPasses()
    computation = _Computation(passes)
    StagePipeline(PipelineStage(), passes=passes).forward_backward([computation], num_microbatches)
    assert " ".join(computation.log) == expected
    assert computation.weight.grad == 2**num_microbatches - 1
