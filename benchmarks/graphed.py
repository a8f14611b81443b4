"""Whole steps of an engine as one CUDA graph: all microbatches' forward and backward, and the optimizer."""

from __future__ import annotations

import torch

from benchmarks.engine import Batch, Engine, StepResult

# Steps before the capture: the engine records its plan in one, adopts it in the next, and follows it in the third.
NUM_EAGER_STEPS = 3


class Graphed(Engine):
    """Another engine, whose fourth step is captured and replayed from then on.

    The first steps run on the stream on which the capture will, since gradient accumulation remembers the stream of
    the first forward.
    """

    def __init__(self, inner: Engine, device: torch.device) -> None:
        self.inner, self.model, self.optimizer = inner, inner.model, inner.optimizer
        self._stream = torch.cuda.Stream(device)
        self._num_eager_left = NUM_EAGER_STEPS
        self._tokens: Batch | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: StepResult | None = None

    def step(self, batch: Batch, *, with_norm: bool = False) -> StepResult:
        tokens = self._copy_in(batch)
        if self._num_eager_left > 0:
            self._num_eager_left -= 1
            return self._eager_step(tokens, with_norm)
        if self._graph is None:
            self._capture(tokens, with_norm)
        assert self._graph is not None and self._result is not None
        assert with_norm is (self._result.grad_norm is not None), "the graph does what the captured step did"
        self._graph.replay()
        self.mark("replay")
        loss, norm = self._result
        return StepResult(loss.clone(), None if norm is None else norm.clone())

    def close(self) -> None:
        if self._graph is not None:
            self._graph.reset()
        self._graph = self._result = self._tokens = None
        self.inner.close()

    def _copy_in(self, batch: Batch) -> Batch:
        """The batch at the addresses that the graph reads."""
        if self._tokens is None:
            self._tokens = [(tokens.clone(), labels.clone()) for tokens, labels in batch]
        for mine, given in zip(self._tokens, batch, strict=True):
            mine[0].copy_(given[0])
            mine[1].copy_(given[1])
        return self._tokens

    def _eager_step(self, tokens: Batch, with_norm: bool) -> StepResult:
        caller = torch.cuda.current_stream()
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            result = self.inner.step(tokens, with_norm=with_norm)
        caller.wait_stream(self._stream)
        return result

    def _capture(self, tokens: Batch, with_norm: bool) -> None:
        graph = torch.cuda.CUDAGraph()
        # Beside a watchdog thread of NCCL that asks for events, only this thread's mistakes may end the capture.
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            result = self.inner.step(tokens, with_norm=with_norm)
        self._graph, self._result = graph, result
