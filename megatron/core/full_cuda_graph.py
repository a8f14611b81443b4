"""A training step as one CUDA graph: run eagerly a few times, captured once, replayed ever after.

What is captured is a function of static inputs: forward and backward of all microbatches, reductions, clipping and the
update. On a replay no Python of it runs. So whatever changes from step to step must come from device memory: inputs
from buffers that are filled before each replay, random numbers from generators that are seeded before it, rates of the
optimizer from tensors that it writes before it. Weights, optimizer state and the engine's buffers have fixed addresses.

[Note: what the host knows after a replay] The engine's Python ran once, when the step was captured. Its state then says
that a step has ended: nothing gathered, no gradients, the weights newer than any that were synchronised. That is what
it would say after each replay, so an eager forward in between (an evaluation) goes by it and sees current weights. Only
events must not cross: an event of the capture means nothing outside of it, nor the reverse, so both sides start with
events of their own. The arenas that the graph reads and writes stay allocated as long as the graph, also when the
engine makes itself a new plan.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron.core.distributed.fsdp import FsdpContext
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, model_parallel_cuda_manual_seed

logger = logging.getLogger(__name__)

Microbatch = dict[str, Tensor]
Step = Callable[[Sequence[Microbatch], Callable[[int], None]], dict[str, Tensor]]
"""(microbatches, draw) -> results; ``draw(i)`` puts the random generator at the start of microbatch ``i``'s stream."""


@dataclass(frozen=True, kw_only=True)
class FullCudaGraphConfig:
    """Whether a training step is captured, and when."""

    enabled: bool = False

    warmup_steps: int = 3
    """Eager steps before the capture. The first records the engine's plan, the second moves buffers to where it says,
    and libraries choose their kernels: 2 is the least, 3 is Megatron-LM's default."""

    def __post_init__(self) -> None:
        if self.warmup_steps < 2:
            raise ValueError(
                f"--cuda-graph-warmup-steps must be at least 2, got {self.warmup_steps}: the first step records where "
                "buffers belong, the second moves them there"
            )


class StepGraph(Protocol):
    """Captures work on a device and repeats it."""

    def warmup(self) -> AbstractContextManager[None]:
        """A scope for the eager steps before the capture."""

    def capture(self, function: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """The work of ``function`` is known, not done; returns its results, which each replay writes anew."""

    def draw(self, index: int) -> None:
        """Within a capture: random numbers that follow are those of microbatch ``index``."""

    def replay(self, seeds: Sequence[int]) -> None:
        """The work is done again, in stream order, with random streams that start at [num_microbatches] ``seeds``."""

    def close(self) -> None:
        """The graph is gone, with its memory."""


class CudaStepGraph:
    """A CUDA graph, the stream that it is captured on, and a random generator for each microbatch.

    Warm-up and capture share a stream of their own: gradient accumulation remembers the stream of the first forward, and
    the default stream cannot be captured. Within a capture generators cannot be seeded; so each microbatch has one of
    its own that the graph knows, and the default generator takes on its state. A replay reads seeds from the
    generators as they are then: dropout is that of an eager step with the same seeds, bit for bit. The streams of a
    tensor-parallel rank have generators of their own, in the same way.

    Args:
        tracker: of the model (``get_cuda_rng_tracker``).

    Raises:
        ValueError: the device is not a CUDA device.
    """

    def __init__(
        self, device: torch.device, *, num_microbatches: int, tracker: CudaRNGStatesTracker | None = None
    ) -> None:
        if device.type != "cuda":
            raise ValueError(
                f"a CUDA graph needs a CUDA device, got {device.type}; train eagerly there (--cuda-graph-impl none)"
            )
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._graph = torch.cuda.CUDAGraph()
        self._default_generator = torch.cuda.default_generators[index]
        self._generators = [torch.Generator(self.device) for _ in range(num_microbatches)]
        self._tracker = tracker
        num_streams = 0 if tracker is None else num_microbatches
        self._rank_generators = [torch.Generator(self.device) for _ in range(num_streams)]

    @contextmanager
    def warmup(self) -> Iterator[None]:
        caller = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            yield
        caller.wait_stream(self._stream)

    def capture(self, function: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        for generator in (*self._generators, *self._rank_generators):
            self._graph.register_generator_state(generator)
        state = self._default_generator.graphsafe_get_state()
        rank_stream = None if self._tracker is None else self._tracker.use(self._rank_generators[0])
        try:
            # Thread-local: NCCL's watchdog and the loader's pinning thread call CUDA meanwhile.
            with (
                _no_garbage_collection(),
                torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"),
            ):
                return function()
        except Exception as error:
            raise RuntimeError(
                "the training step must be capturable as a CUDA graph: fixed shapes, no value read on the host, no "
                "stream left unjoined; it is not, for the reason above; train eagerly (--cuda-graph-impl none)"
            ) from error
        finally:
            self._default_generator.graphsafe_set_state(state)
            if self._tracker is not None and rank_stream is not None:
                self._tracker.use(rank_stream)

    def draw(self, index: int) -> None:
        self._default_generator.graphsafe_set_state(self._generators[index])
        if self._tracker is not None:
            self._tracker.use(self._rank_generators[index])

    def replay(self, seeds: Sequence[int]) -> None:
        for generator, seed in zip(self._generators, seeds, strict=True):
            generator.manual_seed(seed)
        if self._tracker is not None:
            for generator, seed in zip(self._rank_generators, seeds, strict=True):
                generator.manual_seed(self._tracker.own_seed(seed))
        self._graph.replay()

    def close(self) -> None:
        self._graph.reset()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Garbage is collected before, and not within: freeing what other steps left would break a capture."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class StaticInputs:
    """Microbatches at fixed addresses, with the shapes of the first that came."""

    def __init__(self, microbatches: Sequence[Microbatch]) -> None:
        self.microbatches = [{key: torch.empty_like(tensor) for key, tensor in one.items()} for one in microbatches]
        self._targets = [tensor for one in self.microbatches for tensor in one.values()]

    def fill(self, microbatches: Sequence[Microbatch]) -> None:
        """Afterwards, in stream order, the buffers hold these microbatches.

        Raises:
            ValueError: number, names, shapes or dtypes are not those of the first call.
        """
        if len(microbatches) != len(self.microbatches):
            raise ValueError(
                f"a captured step takes {len(self.microbatches)} microbatches, as its first call did, got {len(microbatches)}"
            )
        sources = [
            tensor
            for index, (given, buffers) in enumerate(zip(microbatches, self.microbatches, strict=True))
            for tensor in _matching(given, buffers, index)
        ]
        torch._foreach_copy_(self._targets, sources)


def _matching(given: Microbatch, buffers: Microbatch, index: int) -> list[Tensor]:
    """The tensors of a microbatch, in the order of its buffers."""
    if given.keys() != buffers.keys():
        raise ValueError(
            f"microbatches of a captured step must keep their tensors {sorted(buffers)}, got {sorted(given)} in "
            f"microbatch {index}"
        )
    for key, buffer in buffers.items():
        tensor = given[key]
        if tensor.shape != buffer.shape or tensor.dtype != buffer.dtype:
            raise ValueError(
                f"microbatches of a captured step must keep their shapes and dtypes: {key} of microbatch {index} must be "
                f"{list(buffer.shape)} of {buffer.dtype}, got {list(tensor.shape)} of {tensor.dtype}; pad to one shape, or "
                "train eagerly (--cuda-graph-impl none)"
            )
    return [given[key] for key in buffers]


class FullCudaGraph:
    """Runs a training step: eagerly at first, then from a CUDA graph, with the same numbers.

    Args:
        step: see ``Step``. Nothing of it may be needed on the host but what it returns, and the model's first forward must
            be in it.
        contexts: of the sharded model; nothing may be gathered ahead between steps (``start_param_sync``).
        graph: of the device that the step runs on.
        warmup_steps: eager steps before the capture; see ``FullCudaGraphConfig``.
        tracker: of the model (``get_cuda_rng_tracker``); the graph must know it too.

    Ranks: all make the same calls. Close it before its process groups are destroyed: NCCL waits for graphs that hold its
    kernels.
    """

    def __init__(
        self,
        step: Step,
        contexts: Sequence[FsdpContext],
        graph: StepGraph,
        *,
        warmup_steps: int,
        tracker: CudaRNGStatesTracker | None = None,
    ) -> None:
        self.step, self.contexts, self.graph, self.warmup_steps = step, list(contexts), graph, warmup_steps
        self.tracker = tracker
        self.num_eager_steps = 0
        self._inputs: StaticInputs | None = None
        self._results: dict[str, Tensor] | None = None
        self._weights: list[int] = []  # versions of the main weights, group by group
        self._arenas: list[Tensor] = []  # what the graph writes to, whatever the engine plans later
        self._has_told = self._is_closed = False

    @property
    def is_captured(self) -> bool:
        """True if further steps are replays."""
        return self._results is not None

    def __call__(self, microbatches: Sequence[Microbatch], seeds: Sequence[int]) -> dict[str, Tensor]:
        """The step is done with these inputs, in stream order; returns its results, which stay as they are.

        Args:
            microbatches: [M] their tensors may be reused as soon as the call returns.
            seeds: [M] of each microbatch's random numbers.

        Raises:
            ValueError: inputs differ in shape from those of the first call.
            RuntimeError: the step cannot be captured, or somebody else has written weights since it was.

        Ranks: all; does not block the host, but for the capture.
        """
        if self._is_closed:
            raise RuntimeError("a captured step must not be called after close(); make a new one")
        if self._inputs is None:
            self._inputs = StaticInputs(microbatches)
        self._inputs.fill(microbatches)
        if self._results is None and not self._is_warm():
            return self._run_eagerly(self._inputs, seeds)
        if self._results is None:
            self._results = self._capture(self._inputs)
        if self._weight_versions() != self._weights:
            raise RuntimeError(
                "weights must not be written between the replays of a captured step, which would go on from the old ones; "
                "somebody did (load_state_dict or a checkpoint?): load before the first step, or make a new FullCudaGraph"
            )
        # Generators outside of the graph go on from where the last microbatch would have put them.
        model_parallel_cuda_manual_seed(seeds[-1], self.tracker)
        self.graph.replay(seeds)
        return {name: result.clone() for name, result in self._results.items()}

    def _is_warm(self) -> bool:
        if self.num_eager_steps < self.warmup_steps:
            return False
        # Out of plan, buffers are about to move; a capture would hold them where they are.
        settled = all(context.in_plan for context in self.contexts)
        if not settled and not self._has_told:
            self._has_told = True
            logger.warning("the step is not captured yet: the last one used units in another order than the one before")
        return settled

    def _run_eagerly(self, inputs: StaticInputs, seeds: Sequence[int]) -> dict[str, Tensor]:
        def draw(index: int) -> None:
            model_parallel_cuda_manual_seed(seeds[index], self.tracker)

        self.num_eager_steps += 1
        with self.graph.warmup():
            return self._step(inputs, draw)

    def _step(self, inputs: StaticInputs, draw: Callable[[int], None]) -> dict[str, Tensor]:
        """The step, after which the stream that it ran on has seen all of it."""
        results = self.step(inputs.microbatches, draw)
        for context in self.contexts:
            context.finish_updates()
        return results

    def _capture(self, inputs: StaticInputs) -> dict[str, Tensor]:
        def captured() -> dict[str, Tensor]:
            self._renew_events()
            return self._step(inputs, self.graph.draw)

        self._renew_events()
        results = self.graph.capture(captured)
        self._renew_events()
        self._arenas = [arena for context in self.contexts for arena in context.planner.arenas]
        self._weights = self._weight_versions()
        return results

    def _renew_events(self) -> None:
        """Afterwards the engine waits for nothing but work of the stream that the caller is on.

        [Note: what the host knows after a replay]
        """
        for context in self.contexts:
            context.weights_changed()
            context.unsharder.ranges_moved()

    def _weight_versions(self) -> list[int]:
        return [group.weights.write_count for context in self.contexts for group in context.groups]

    def close(self) -> None:
        """The graph and its memory are given back."""
        self._is_closed = True
        self._results, self._inputs, self._arenas = None, None, []
        self.graph.close()
