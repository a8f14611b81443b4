"""Whole steps of our engine as one CUDA graph: all microbatches' forward and backward, and the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.engines.engine import Batch, Engine, MemoryPlan, StepResult
from benchmarks.engines.ours import Ours
from megatron.core.full_cuda_graph import CudaStepGraph, FullCudaGraph, FullCudaGraphConfig, Microbatch, StepGraph

# The next step is captured, and replayed at once.
NUM_EAGER_STEPS = FullCudaGraphConfig.warmup_steps


class Graphed(Engine):
    """An engine of ours whose steps run in the framework's ``FullCudaGraph``.

    Args:
        inner: the engine; it must launch nothing between steps.
        make_graph: makes the graph for a number of microbatches; a CUDA graph on the device when None.
    """

    def __init__(self, inner: Ours, device: torch.device, make_graph: Callable[[int], StepGraph] | None = None) -> None:
        self.inner, self.model, self.optimizer = inner, inner.model, inner.optimizer
        self._make_graph = make_graph or (lambda count: CudaStepGraph(device, num_microbatches=count))
        self._step: FullCudaGraph | None = None
        self._num_steps = 0
        self._with_norm = False

    def step(self, batch: Batch, *, with_norm: bool = False) -> StepResult:
        if self._step is None:
            self._with_norm = with_norm
            graph = self._make_graph(len(batch))
            self._step = FullCudaGraph(self._run, self.inner.contexts, graph, warmup_steps=NUM_EAGER_STEPS)
        assert with_norm is self._with_norm, "the graph does what the captured step did"
        microbatches = [{"tokens": tokens, "labels": labels} for tokens, labels in batch]
        results = self._step(microbatches, seeds=[0] * len(batch))
        self._num_steps += 1
        if self._num_steps > NUM_EAGER_STEPS and not self._step.is_captured:
            raise RuntimeError(
                f"step {self._num_steps} must have been captured, got an eager one: the engine has not found its plan"
            )
        self.mark("replay" if self._step.is_captured else "eager step")
        return StepResult(results["loss"], results.get("grad_norm"))

    def _run(self, microbatches: Sequence[Microbatch], draw: Callable[[int], None]) -> dict[str, Tensor]:
        del draw  # nothing is drawn in this model
        batch = [(microbatch["tokens"], microbatch["labels"]) for microbatch in microbatches]
        loss, norm = self.inner.step(batch, with_norm=self._with_norm)
        return {"loss": loss} if norm is None else {"loss": loss, "grad_norm": norm}

    def memory_plan(self) -> MemoryPlan | None:
        return self.inner.memory_plan()

    def close(self) -> None:
        if self._step is not None:
            self._step.close()
        self.inner.close()
