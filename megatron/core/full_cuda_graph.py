"""A training step as one CUDA graph: run eagerly a few times, captured once, then replayed.

The captured function computes forward and backward of all microbatches, reductions, clipping and the update from static
inputs. A replay runs none of its Python. So whatever changes from step to step must come from device memory: inputs from
buffers that are filled before each replay, random numbers from generators that are seeded before it, learning rates from
tensors that the optimizer writes before it. Weights, optimizer state and the engine's buffers have fixed addresses.

[Note: what the host knows after a replay] The engine's Python ran once, when the step was captured. Its state says that a
step has ended: nothing is gathered, there are no gradients, and the main weights are newer than the model weights. The
same holds after each replay, so an eager forward in between (an evaluation) sees current weights. Only events are
different: an event that was recorded in the capture has no meaning outside, nor the reverse, so events are renewed before
and after the capture. The arenas that the graph uses stay allocated as long as the graph, also when the engine plans anew.
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

from megatron.core.distributed.fsdp import FsdpContext, no_garbage_collection
from megatron.core.elsewhere import elsewhere
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, seed_streams

logger = logging.getLogger(__name__)

Microbatch = dict[str, Tensor]
Step = Callable[[Sequence[Microbatch], Callable[[int], None]], dict[str, Tensor]]
"""(microbatches, draw) -> results; ``draw(i)`` seeds the random generators for microbatch ``i``."""


@dataclass(frozen=True, kw_only=True)
class FullCudaGraphConfig:
    """Settings of the CUDA graph of a training step."""

    enabled: bool = False
    """Whether the step is captured."""

    warmup_steps: int = 3
    """Eager steps before the capture, at least 2: the first records the engine's plan, the second moves buffers into its
    arena, and libraries choose their kernels. 3 is Megatron-LM's default."""

    def __post_init__(self) -> None:
        if self.warmup_steps < 2:
            raise ValueError(
                f"--cuda-graph-warmup-steps must be at least 2, got {self.warmup_steps}: the first step records the "
                "engine's plan, the second moves buffers into its arena"
            )


class StepGraph(Protocol):
    """A graph that captures the work of a step on a device and replays it."""

    def warmup(self) -> AbstractContextManager[None]:
        """Return a context for the eager steps before the capture."""

    def capture(self, function: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Capture the work of ``function`` without running it; return its results, which each replay overwrites."""

    def draw(self, index: int) -> None:
        """Switch, within a capture, to the random generators of microbatch ``index``."""

    def replay(self, seeds: Sequence[int]) -> None:
        """Run the captured work again, in stream order, with generators seeded by [num_microbatches] ``seeds``."""

    def close(self) -> None:
        """Free the graph and its memory."""


class CudaStepGraph:
    """A CUDA graph with the stream that it is captured on and a random generator for each microbatch.

    Warm-up and capture share one side stream: gradient accumulation remembers the stream of the first forward, and the
    default stream cannot be captured. Generators cannot be seeded within a capture. So each microbatch has its own
    generator, registered with the graph, whose state the default generator takes on. A replay reads the generators' current
    seeds, so dropout is bitwise that of an eager step with the same seeds. The random stream of a tensor-parallel rank has
    generators of its own, used in the same way.

    Args:
        tracker: the model's tracker (``rng_tracker_of``).

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
        self._stream = torch.cuda.Stream(self.device)
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
        caller = torch.cuda.current_stream(self.device)
        gc.collect()
        try:
            # Nothing is collected within: freeing memory of other steps would break a capture. Thread-local, since NCCL's watchdog and the loader's pinning thread call CUDA meanwhile.
            with (
                no_garbage_collection(),
                torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"),
            ):
                return function()
        except Exception as error:
            raise RuntimeError(
                "the training step must be capturable as a CUDA graph: fixed shapes, no value read on the host, no "
                "stream left unjoined; the capture failed for the reason above; train eagerly (--cuda-graph-impl none)"
            ) from error
        finally:
            self._default_generator.graphsafe_set_state(state)
            if self._tracker is not None and rank_stream is not None:
                self._tracker.use(rank_stream)
            # The capture began with a write of the generators' seeds on its stream; a replay writes others on the caller's.
            caller.wait_stream(self._stream)

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


class StaticInputs:
    """Buffers of microbatches at fixed addresses, with the shapes of the first ones."""

    def __init__(self, microbatches: Sequence[Microbatch]) -> None:
        self.microbatches = [{key: torch.empty_like(tensor) for key, tensor in one.items()} for one in microbatches]
        self._targets = [tensor for one in self.microbatches for tensor in one.values()]

    def fill(self, microbatches: Sequence[Microbatch]) -> None:
        """Copy microbatches into the buffers, in stream order.

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
    """Return the tensors of a microbatch in the order of its buffers; check names, shapes and dtypes."""
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
    """A training step that runs eagerly at first and then from a CUDA graph, with the same numbers.

    Args:
        step: see ``Step``. The host may need only what it returns, and the model's first forward must be in it.
        contexts: the contexts of the sharded model; nothing may be gathered between steps (``start_param_sync``).
        graph: the graph of the device on which the step runs.
        warmup_steps: eager steps before the capture; see ``FullCudaGraphConfig``.
        tracker: the model's tracker (``rng_tracker_of``); the graph must have the same.

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
        self._arenas: list[Tensor] = []  # kept alive for the graph, also when the engine plans anew
        self._has_warned = self._is_closed = False

    @property
    def is_captured(self) -> bool:
        """True if further steps are replays."""
        return self._results is not None

    def __call__(self, microbatches: Sequence[Microbatch], seeds: Sequence[int]) -> dict[str, Tensor]:
        """Run the step on these inputs, in stream order, and return its results, which later steps do not overwrite.

        Args:
            microbatches: [M] inputs; their tensors may be reused as soon as the call returns.
            seeds: [M] seeds of the microbatches' random numbers.

        Raises:
            ValueError: the inputs' shapes differ from those of the first call.
            RuntimeError: the step cannot be captured, or weights were written outside the step since the capture.

        Ranks: all; does not block the host, except for the capture.
        """
        if self._is_closed:
            raise RuntimeError("a captured step must not be called after close(); make a new one")
        if self._inputs is None:
            self._inputs = StaticInputs(microbatches)
        self._inputs.fill(microbatches)
        if self._results is None and not self._is_warm():
            return self._run_eagerly(self._inputs, seeds)
        for context in self.contexts:
            context.updater.begin_replay()
        if self._results is None:
            self._results = self._capture(self._inputs)
        if self._weight_versions() != self._weights:
            raise RuntimeError(
                "weights must not be written between the replays of a captured step, which would continue from the old ones, "
                "but they were (load_state_dict or a checkpoint?); load before the first step, or make a new FullCudaGraph"
            )
        # Generators outside the graph must be where an eager step would have left them.
        seed_streams(seeds[-1], self.tracker)
        self.graph.replay(seeds)
        return {name: result.clone() for name, result in self._results.items()}

    def _is_warm(self) -> bool:
        if self.num_eager_steps < self.warmup_steps:
            return False
        # Out of plan, buffers are about to move, and a capture would record their old addresses.
        in_plan = all(context.planner.in_plan for context in self.contexts)
        if not in_plan and not self._has_warned:
            self._has_warned = True
            logger.warning("the step is not captured yet: the last step ran units in another order than the one before")
        return in_plan

    def _run_eagerly(self, inputs: StaticInputs, seeds: Sequence[int]) -> dict[str, Tensor]:
        def draw(index: int) -> None:
            seed_streams(seeds[index], self.tracker)

        self.num_eager_steps += 1
        with self.graph.warmup():
            return self._step(inputs, draw)

    def _step(self, inputs: StaticInputs, draw: Callable[[int], None]) -> dict[str, Tensor]:
        """Run the step and make its stream wait for all of its work."""
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
        """Replace the engine's events, so that it waits for work of the current stream alone.

        See [Note: what the host knows after a replay].
        """
        for context in self.contexts:
            context.weights_changed()
            context.unsharder.ranges_moved()

    def _weight_versions(self) -> list[int]:
        return [group.weights.freshness.write_count for context in self.contexts for group in context.groups]

    def close(self) -> None:
        """Free the graph and its memory."""
        self._is_closed = True
        self._results, self._inputs, self._arenas = None, None, []
        self.graph.close()


FullCudaGraphWrapper = elsewhere(
    __name__,
    "FullCudaGraphWrapper",
    "--cuda-graph-impl full_iteration captures iterations, with FullCudaGraph",
)
StaticBufferLoader = elsewhere(__name__, "StaticBufferLoader", "FullCudaGraph copies microbatches into StaticInputs")
