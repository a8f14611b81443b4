"""Random numbers of tensor-parallel ranks: the same on all of them, except within a fork.

[Note: random streams of tensor ranks] What all tensor-parallel ranks compute alike (dropout of whole hidden states) must
draw alike on all of them: it draws from torch's default generator, which they seed alike. Where each has a part (attention
probabilities of its heads; hidden states of its part of the sequence) they must draw apart: such code runs within
``CudaRNGStatesTracker.fork``, which puts a stream of the rank's own in the default generator's place and leaves the
default one as it was. A model has one tracker, which its modules are given; there is none where nothing is split.

On CUDA a fork exchanges whole generator states by reference and asks the device nothing, so it can be captured: a CUDA
graph has a generator of its own for each stream (``use``).

Source: Megatron-Core's names; there the tracker is global.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

MODEL_PARALLEL_STREAM = "model-parallel-rng"

States = dict[tuple[str, torch.device], torch.Tensor]


class CudaRNGStatesTracker:
    """Named random streams of one tensor-parallel rank, on whatever devices they are used (CUDA or CPU).

    Args:
        rank: of the tensor-parallel group.
        seed: of the model-parallel stream until ``seed`` is called.
    """

    def __init__(self, rank: int = 0, seed: int = 0) -> None:
        self.rank = rank
        self._seeds: dict[str, int] = {}
        self._generators: dict[tuple[str, torch.device], torch.Generator] = {}
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """The model-parallel stream starts anew, on each device, as this rank's of ``seed``."""
        self._restart(MODEL_PARALLEL_STREAM, self.own_seed(seed))

    def own_seed(self, seed: int) -> int:
        """The seed in [0, 2**63) of this rank's stream: unrelated to other ranks' and to ``seed`` itself."""
        digest = hashlib.sha256(f"tensor rank {self.rank}/{seed}".encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1

    def add(self, name: str, seed: int) -> None:
        """A further stream, which starts at ``seed`` as it is.

        Raises:
            ValueError: there is a stream of this name.
        """
        if name in self._seeds:
            raise ValueError(f"a random stream must have a name of its own, got {name!r} a second time")
        self._restart(name, seed)

    def reset(self) -> None:
        """There are no streams."""
        self._seeds.clear()
        self._generators.clear()

    def get_states(self) -> States:
        """The state of each stream on each device where it has been used, by (name, device)."""
        return {key: generator.get_state() for key, generator in self._generators.items()}

    def set_states(self, states: Mapping[tuple[str, torch.device], torch.Tensor]) -> None:
        """The streams are where ``get_states`` found them; those that it had not seen are at their start."""
        self._go_to(self._seeds, states)

    def _go_to(self, seeds: Mapping[str, int], states: Mapping[tuple[str, torch.device], torch.Tensor]) -> None:
        for key, generator in self._generators.items():
            if key in states:
                generator.set_state(states[key])
            else:  # it has been used since for the first time
                generator.manual_seed(seeds[key[0]])

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL_STREAM, device: torch.device | None = None) -> Iterator[None]:
        """In the scope, random functions on ``device`` draw from a stream of this tracker, and go on where it was.

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
        """From now on the stream on the generator's device is this generator; returns the one that it was."""
        device = _exact(generator.device)
        before = self._stream(name, device)
        self._generators[name, device] = generator
        return before

    def recomputation(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Scopes for a forward pass and for its repetition in backward, which draws what the first drew.

        The ``context_fn`` of torch.utils.checkpoint; it cannot be captured.
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


def get_cuda_rng_tracker(model: nn.Module) -> CudaRNGStatesTracker | None:
    """The tracker of a model (wrapped or not), None where nothing of it is split over tensor-parallel ranks."""
    trackers = (getattr(module, "rng_tracker", None) for module in model.modules())
    return next((tracker for tracker in trackers if tracker is not None), None)


def model_parallel_cuda_manual_seed(seed: int, tracker: CudaRNGStatesTracker | None = None) -> None:
    """Torch's generators are at the start of ``seed``, on all devices; the tracker's is at the start of its rank's stream.

    Args:
        seed: the same on all tensor-parallel ranks.
        tracker: of the model (``get_cuda_rng_tracker``).
    """
    torch.manual_seed(seed)
    if tracker is not None:
        tracker.seed(seed)


def _exact(device: torch.device | None) -> torch.device:
    """The device with its number, where it has one."""
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


@contextmanager
def _on_cuda(stream: torch.Generator, device: torch.device) -> Iterator[None]:
    default = torch.cuda.default_generators[device.index]
    outer = default.graphsafe_get_state()
    default.graphsafe_set_state(stream)  # by reference: what is drawn moves the stream on
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
