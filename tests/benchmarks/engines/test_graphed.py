"""An engine in a graph trains as it does without, from the step on in which it is captured."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.engines.graphed import NUM_EAGER_STEPS, Graphed
from benchmarks.engines.ours import Ours, parse_ours
from tests.support.launch import run_ranks
from tests.support.tape_graph import TapeGraph


def _settings_and_batches(num_steps: int) -> tuple:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from benchmarks.engines.engine import EngineSettings
    from benchmarks.engines.plain_gpt import SHAPES
    from benchmarks.measure.steps import make_batch

    device = torch.device("cpu")
    settings = EngineSettings(
        shape=SHAPES["tiny"],
        mesh=init_device_mesh("cpu", (dist.get_world_size(),)),
        device=device,
        learning_rate=1e-3,
        seed=7,
    )
    batches = [
        make_batch(step, num_microbatches=2, num_tokens=16, vocab_size=256, seed=7, device=device)
        for step in range(num_steps)
    ]
    return settings, batches


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _persistent(engine: Ours) -> list[Tensor]:
    """What lives from step to step: main weights, and the optimizer's state."""
    parameters = list(engine.model.parameters())
    states = [engine.optimizer.state[parameter] for parameter in parameters]
    tensors = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    optimizer: Any = engine.optimizer
    tensors += [table.steps for table in optimizer._tables]
    return [_local(tensor) for tensor in [*(parameter.detach() for parameter in parameters), *tensors]]


def _losses_with_and_without() -> tuple[list[float], list[float], int, list[str]]:
    settings, batches = _settings_and_batches(NUM_EAGER_STEPS + 3)
    eager = Ours(settings, parse_ours("ours-nccl"))
    expected = [eager.step(batch).loss.item() for batch in batches]
    eager.close()

    inner = Ours(settings, parse_ours("ours-nccl-graph"))
    tapes: list[TapeGraph] = []

    def make_tape(num_microbatches: int) -> TapeGraph:
        assert num_microbatches == 2
        tapes.append(TapeGraph(lambda: _persistent(inner)))
        return tapes[-1]

    graphed = Graphed(inner, settings.device, make_tape)
    marks: list[str] = []
    graphed.mark = marks.append
    got = []
    try:
        for batch in batches:
            got.append(graphed.step(batch).loss.item())
    finally:
        graphed.close()
    return got, expected, tapes[0].num_replays, marks


def test_losses_are_those_of_the_eager_engine() -> None:
    for got, expected, num_replays, marks in run_ranks(2, _losses_with_and_without):
        assert got == expected
        assert num_replays == 3
        assert marks == ["eager step"] * NUM_EAGER_STEPS + ["replay"] * 3
