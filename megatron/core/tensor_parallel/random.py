"""Random numbers of tensor-parallel ranks: the same on all of them, except within a fork.

[Note: random streams of tensor ranks] Where all tensor-parallel ranks compute the same (dropout of whole hidden states), they
must draw the same numbers: they use torch's default generator with the same seed. Where each has a part (attention
probabilities of its heads, hidden states of its part of the sequence), they must draw different numbers: such code runs
within ``CudaRNGStatesTracker.fork``, which replaces the default generator by the rank's own stream and restores it after. A
model has one tracker, which is passed to its modules; there is none where the model is not split. Models that are given no process
groups share the default one of ``parallel_state``.

On CUDA a fork swaps generator states by reference, without asking the device, so it can be captured: a CUDA graph has its
own generator for each stream (``use``).

Source: Megatron-Core's names; there the only tracker is a global one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

MODEL_PARALLEL_STREAM = "model-parallel-rng"
_DATA_PARALLEL_STREAM = "data-parallel-rng"
_EXPERT_PARALLEL_STREAM = "expert-parallel-rng"

States = dict[tuple[str, torch.device], torch.Tensor]


class CudaRNGStatesTracker:
    """Named random streams of one tensor-parallel rank, one generator for each device on which they are used.

    Args:
        rank: index in the tensor-parallel process group.
        seed: seed of the model-parallel stream until ``seed`` is called.
    """

    def __init__(self, rank: int = 0, seed: int = 0) -> None:
        self.rank = rank
        self._seeds: dict[str, int] = {}
        self._generators: dict[tuple[str, torch.device], torch.Generator] = {}
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Restart the model-parallel stream, on each device, at this rank's seed for ``seed``."""
        self._restart(MODEL_PARALLEL_STREAM, self.own_seed(seed))

    def own_seed(self, seed: int, stream: str = "tensor rank") -> int:
        """Derive this rank's seed in [0, 2**63), unrelated to other ranks' and to ``seed`` itself."""
        digest = hashlib.sha256(f"{stream} {self.rank}/{seed}".encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1

    def is_initialized(self) -> bool:
        """Return whether there is a stream."""
        return bool(self._seeds)

    def add(self, name: str, seed: int) -> None:
        """Add a stream that starts at ``seed`` itself.

        Raises:
            ValueError: there is already a stream of this name.
        """
        if name in self._seeds:
            raise ValueError(f"a random stream must have a name of its own, got {name!r} a second time")
        self._restart(name, seed)

    def reset(self) -> None:
        """Remove all streams."""
        self._seeds.clear()
        self._generators.clear()

    def get_states(self) -> States:
        """Return the state of each stream on each device where it was used, by (name, device)."""
        return {key: generator.get_state() for key, generator in self._generators.items()}

    def set_states(self, states: Mapping[tuple[str, torch.device], torch.Tensor] | Mapping[str, torch.Tensor]) -> None:
        """Restore the states that ``get_states`` of any tracker returned; restart generators that are not among them.

        Args:
            states: by (name, device), or by name for the current device; streams that this tracker lacks are added.
        """
        exact = {(key, _exact(None)) if isinstance(key, str) else key: state for key, state in states.items()}
        for (name, device), state in exact.items():
            if name not in self._seeds:
                generator = torch.Generator(device)
                generator.set_state(state)
                self._seeds[name] = generator.initial_seed()
            self._stream(name, device)
        self._go_to(self._seeds, exact)

    def _go_to(self, seeds: Mapping[str, int], states: Mapping[tuple[str, torch.device], torch.Tensor]) -> None:
        for key, generator in self._generators.items():
            if key in states:
                generator.set_state(states[key])
            else:  # first used after get_states
                generator.manual_seed(seeds[key[0]])

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL_STREAM, device: torch.device | None = None) -> Iterator[None]:
        """Make random functions on ``device`` draw from a stream of this tracker within the scope.

        The stream continues where it was.

        Args:
            device: None: the current CUDA device, or the CPU where there is none.

        Raises:
            RuntimeError: there is no stream of this name.
        """
        device = _exact(device)
        stream = self._stream(name, device)
        with _on_cuda(stream, device) if device.type == "cuda" else _on_cpu(stream):
            yield

    def use(self, generator: torch.Generator, name: str = MODEL_PARALLEL_STREAM) -> torch.Generator:
        """Replace a stream's generator on the generator's device; return the previous one."""
        device = _exact(generator.device)
        before = self._stream(name, device)
        self._generators[name, device] = generator
        return before

    def recomputation(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return contexts for a forward pass and for its recomputation in backward, which draws the same numbers.

        It is a ``context_fn`` of torch.utils.checkpoint; it cannot be captured.
        """
        seeds: dict[str, int] = {}
        states: States = {}
        return self._recording(seeds, states), self._repeating(seeds, states)

    @contextmanager
    def _recording(self, seeds: dict[str, int], states: States) -> Iterator[None]:
        seeds.update(self._seeds)
        states.update(self.get_states())
        yield

    @contextmanager
    def _repeating(self, seeds: dict[str, int], states: States) -> Iterator[None]:
        now = self.get_states()
        self._go_to(seeds, states)
        try:
            yield
        finally:
            self.set_states(now)

    def _restart(self, name: str, seed: int) -> None:
        self._seeds[name] = seed
        for (other, _), generator in self._generators.items():
            if other == name:
                generator.manual_seed(seed)

    def _stream(self, name: str, device: torch.device) -> torch.Generator:
        generator = self._generators.get((name, device))
        if generator is None:
            if name not in self._seeds:
                raise RuntimeError(f"a random stream must be added before it is forked, got {name!r}; call add() first")
            generator = torch.Generator(device).manual_seed(self._seeds[name])
            self._generators[name, device] = generator
        return generator


def rng_tracker_of(model: nn.Module) -> CudaRNGStatesTracker | None:
    """Return the tracker of a model (wrapped or not); None where it is not split over tensor-parallel ranks."""
    trackers = (getattr(module, "rng_tracker", None) for module in model.modules())
    return next((tracker for tracker in trackers if tracker is not None), None)


def seed_streams(seed: int, tracker: CudaRNGStatesTracker | None = None) -> None:
    """Seed torch's default generators, of the CPU and all CUDA devices, and restart the tracker's model-parallel stream.

    Args:
        seed: the same on all tensor-parallel ranks.
        tracker: the model's tracker (``rng_tracker_of``).
    """
    # Each microbatch comes here. torch.manual_seed would format the stack for each kind of device that is not in use, in a
    # tenth of a millisecond each.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
    if tracker is not None:
        tracker.seed(seed)


def get_cuda_rng_tracker(
    use_te_rng_tracker: bool = False, inference_rng_tracker: bool = False, use_cudagraphable_rng: bool = False
) -> CudaRNGStatesTracker:
    """Return the default tracker: that of models that are given no process groups.

    Args:
        use_te_rng_tracker, use_cudagraphable_rng: accepted; the tracker can be captured as it is.

    Raises:
        NotImplementedError: ``inference_rng_tracker``.
    """
    from megatron.core import parallel_state

    if inference_rng_tracker:
        raise NotImplementedError("inference_rng_tracker must be False, got True: inference has no tracker of its own")
    return parallel_state.default_rng_tracker()


def model_parallel_cuda_manual_seed(
    seed: int,
    te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    tp_rank: int | None = None,
    ep_rank: int | None = None,
    etp_rank: int | None = None,
    gtp_remat_rank: int | None = None,
    egtp_remat_rank: int | None = None,
    force_reset_rng: bool = False,
    gtp_remat_world_size: int | None = None,
    egtp_remat_world_size: int | None = None,
) -> None:
    """Seed torch's default generators, on all devices, and restart the streams of the default tracker.

    Args:
        seed: the same on all tensor-parallel ranks.
        tp_rank, ep_rank, etp_rank: this rank's index in the groups; None: that in ``parallel_state``.
        te_rng_tracker, use_cudagraphable_rng, force_reset_rng, gtp_remat_rank, egtp_remat_rank, gtp_remat_world_size,
            egtp_remat_world_size: accepted; streams are always restarted, and weights at rest draw nothing.

    Source: Megatron-Core's names; seeds are derived in another way (``CudaRNGStatesTracker.own_seed``).
    """
    from megatron.core import parallel_state

    tracker = get_cuda_rng_tracker(te_rng_tracker, inference_rng_tracker, use_cudagraphable_rng)
    given = {"tp": tp_rank, "ep": ep_rank, "expt_tp": etp_rank}
    tp, ep, etp = (parallel_state.default_rank(name) if rank is None else rank for name, rank in given.items())
    tracker.rank = tp
    tracker.reset()
    seed_streams(seed, tracker)
    tracker.add(_DATA_PARALLEL_STREAM, seed)
    tracker.add(_EXPERT_PARALLEL_STREAM, tracker.own_seed(seed, f"expert rank {ep}/{etp}"))


def get_expert_parallel_rng_tracker_name() -> str:
    """Return the name of the stream of a rank's experts."""
    return _EXPERT_PARALLEL_STREAM


def get_data_parallel_rng_tracker_name() -> str:
    """Return the name of the stream that is the same on all tensor-parallel ranks."""
    return _DATA_PARALLEL_STREAM


def is_graph_safe_cuda_rng_tracker(tracker: object) -> bool:
    """Return whether forks of a tracker can be captured in a CUDA graph."""
    return isinstance(tracker, CudaRNGStatesTracker)


def checkpoint(function: Callable[..., Any], distribute_saved_activations: bool, *args: Any) -> Any:
    """Call ``function(*args)``, keep nothing for backward, and compute it again there with the same random numbers.

    Args:
        distribute_saved_activations: must be False.

    Raises:
        NotImplementedError: ``distribute_saved_activations``: use sequence parallelism.
    """
    if distribute_saved_activations:
        raise NotImplementedError("distribute_saved_activations must be False, got True; use sequence_parallel")
    streams = get_cuda_rng_tracker().recomputation

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        forward, again = streams()
        return forward, _recomputing(again)

    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, context_fn=contexts)


class _Recomputations:
    """How many recomputations run on this thread."""

    depth = 0


_recomputations = _Recomputations()


@contextmanager
def _recomputing(streams: AbstractContextManager[None]) -> Iterator[None]:
    _recomputations.depth += 1
    try:
        with streams:
            yield
    finally:
        _recomputations.depth -= 1


def is_checkpointing() -> bool:
    """Return whether ``checkpoint`` computes something again just now."""
    return _recomputations.depth > 0


def _exact(device: torch.device | None) -> torch.device:
    """Add the current index to a CUDA device without one; None: CUDA if available, else the CPU."""
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


@contextmanager
def _on_cuda(stream: torch.Generator, device: torch.device) -> Iterator[None]:
    default = torch.cuda.default_generators[device.index]
    outer = default.graphsafe_get_state()
    default.graphsafe_set_state(stream)  # by reference: draws advance the stream
    try:
        yield
    finally:
        default.graphsafe_set_state(outer)


@contextmanager
def _on_cpu(stream: torch.Generator) -> Iterator[None]:
    default = torch.default_generator
    outer = default.get_state()
    default.set_state(stream.get_state())
    try:
        yield
    finally:
        stream.set_state(default.get_state())
        default.set_state(outer)
