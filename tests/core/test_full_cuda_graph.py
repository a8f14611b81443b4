"""A captured step computes what an eager one does, and what a graph could not repeat is refused. On the CPU a tape replays."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.distributed.fsdp import fully_shard, microbatch
from megatron.core.distributed.fsdp.api.module import contexts_of
from megatron.core.distributed.fsdp.buffers.weights import Weights
from megatron.core.distributed.fsdp.codec.scaled_weights import ScaledWeights
from megatron.core.distributed.fsdp.config.placement import strategy_placements
from megatron.core.distributed.fsdp.flat_optimizer.flat_adamw import FlatAdamW
from megatron.core.distributed.fsdp.runtime import context as context_module
from megatron.core.full_cuda_graph import (
    CudaStepGraph,
    FullCudaGraph,
    FullCudaGraphConfig,
    Microbatch,
    StaticInputs,
)
from tests.support.capture_streams import CaptureStreams
from tests.support.float8_weights import WIDTH as FP8_WIDTH
from tests.support.float8_weights import make_codec, make_fp8_net
from tests.support.launch import run_ranks
from tests.support.tape_graph import TapeGraph

_WIDTH, _STEPS = 12, 7


class _Training:
    """A model with dropout under FSDP, its optimizer, and a step over both that can be captured."""

    def __init__(self, *, warmup_steps: int, streams: CaptureStreams | None = None, grad_divisor: int = 1) -> None:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)]
        self.model = nn.Sequential(*layers, nn.Linear(_WIDTH, _WIDTH))
        for layer in layers:
            fully_shard(layer, grad_divisor=grad_divisor)
        fully_shard(self.model, grad_divisor=grad_divisor)
        self.optimizer = FlatAdamW(self.model.parameters(), lr=0.1, overlaps_forward=True)
        self.tape = TapeGraph(self.persistent, streams)
        contexts = contexts_of(self.model)
        self.run = FullCudaGraph(self.step, contexts, self.tape, warmup_steps=warmup_steps)

    def persistent(self) -> list[Tensor]:
        state = [value for entries in self.optimizer.state.values() for value in entries.values()]
        weights = [p.detach() for p in self.model.parameters()]
        steps = [table.steps for table in self.optimizer._tables]
        return [getattr(tensor, "_local_tensor", tensor) for tensor in (*weights, *state, *steps)]

    def step(self, microbatches: Sequence[Microbatch], draw: Callable[[int], None]) -> dict[str, Tensor]:
        total = torch.zeros(())
        for index, data in enumerate(microbatches):
            draw(index)
            with microbatch(self.model, is_first=index == 0, is_last=index == len(microbatches) - 1):
                loss = self.model(data["x"]).square().mean()
                total += loss.detach()
                loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"loss": total}

    def inputs(self, generator: torch.Generator) -> Tensor:
        return torch.randn(4, _WIDTH, generator=generator)

    def train(self, iteration: int, num_microbatches: int) -> Tensor:
        """Run one step at its own learning rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 * (iteration + 1)
        self.optimizer.refresh_hyperparameters()
        inputs = torch.Generator().manual_seed(100 * iteration + dist.get_rank())
        microbatches = [{"x": self.inputs(inputs)} for _ in range(num_microbatches)]
        seeds = [1000 * iteration + 10 * index + dist.get_rank() for index in range(num_microbatches)]
        result = self.run(microbatches, seeds)["loss"]
        for data in microbatches:
            data["x"].fill_(float("nan"))  # whoever gave them may use their memory again
        return result

    @torch.no_grad()
    def evaluate(self) -> float:
        self.model.eval()
        loss = self.model(torch.ones(2, _WIDTH)).sum().item()
        self.model.train()
        return loss


def _train(warmup_steps: int, num_microbatches: int) -> tuple[list[float], int]:
    """(losses of steps and evaluations, replays)."""
    training = _Training(warmup_steps=warmup_steps)
    steps, evaluations = [], []
    for iteration in range(_STEPS):
        steps.append(training.train(iteration, num_microbatches))
        if iteration in (0, 3, 5):
            evaluations.append(training.evaluate())
    training.run.close()
    return [*(loss.item() for loss in steps), *evaluations], training.tape.num_replays


def _train_in_each_way() -> dict[tuple[int, int], tuple[list[float], int]]:
    return {(warmup, count): _train(warmup, count) for warmup in (2, 3, _STEPS) for count in (1, 3)}


@cache
def _losses(num_ranks: int) -> list[dict[tuple[int, int], tuple[list[float], int]]]:
    return run_ranks(num_ranks, _train_in_each_way)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize("warmup", [2, 3])
def test_replays_give_the_losses_of_eager_steps(num_ranks: int, num_microbatches: int, warmup: int) -> None:
    """To the last bit: new inputs, dropout and rates in each step, evaluations before and after the capture.

    A replay is operations on memory alone, so a rate, a seed or a flag that Python kept would show in the losses.
    """
    for by_kind in _losses(num_ranks):
        eager, num_eager = by_kind[_STEPS, num_microbatches]
        graphed, num_replays = by_kind[warmup, num_microbatches]
        assert (num_eager, num_replays) == (0, _STEPS - warmup)
        assert len(set(eager)) == len(eager)
        assert graphed == eager


class _Fp8Training(_Training):
    """As ``_Training``, without dropout, of a net whose matrices rest in bytes."""

    def __init__(self, recipe: str, strategy: str, *, warmup_steps: int) -> None:
        self.model = make_fp8_net(make_codec(recipe))  # type: ignore[assignment]
        for module in (*self.model.blocks, self.model):  # type: ignore[misc]
            fully_shard(module, placements=strategy_placements(strategy))
        self.optimizer = FlatAdamW(self.model.parameters(), lr=0.1, overlaps_forward=True)
        self.tape = TapeGraph(self.persistent)
        self.run = FullCudaGraph(self.step, contexts_of(self.model), self.tape, warmup_steps=warmup_steps)

    def persistent(self) -> list[Tensor]:
        scaled = [weights for weights in self.weights() if isinstance(weights, ScaledWeights)]
        return [
            *super().persistent(),
            *(weights.model.local for weights in self.weights()),
            *(tensor for weights in scaled for tensor in vars(weights.scales).values()),
        ]

    def weights(self) -> list[Weights]:
        return [group.weights for group in contexts_of(self.model)[0].groups]

    def inputs(self, generator: torch.Generator) -> Tensor:
        return torch.randn(4, FP8_WIDTH, generator=generator).bfloat16()

    def train(self, iteration: int, num_microbatches: int) -> Tensor:
        with patch.object(ScaledWeights, "is_captured", property(lambda _: self.tape.is_capturing)):
            return super().train(iteration, num_microbatches)


# Evaluations after each step; the second one without a step between measures anew. In the first order the last step before the
# capture is followed by two, in the second by none, so that what replays find is left to what ran between them.
_EVALUATIONS = ((0, 1, 2, 3, 0, 2), (0, 0, 0, 3, 0, 2))


def _train_in_fp8(recipe: str, strategy: str, order: int, warmup_steps: int) -> list[list[float]]:
    """Losses of steps and evaluations, and the scales after each."""
    training = _Fp8Training(recipe, strategy, warmup_steps=warmup_steps)
    found = []
    for iteration in range(_STEPS):
        found.append([training.train(iteration, 2).item()])
        for _ in range(_EVALUATIONS[order][iteration % 6]):
            with torch.no_grad():
                found[-1].append(training.model(torch.ones(2, FP8_WIDTH).bfloat16()).sum().item())
        for weights in training.weights():
            if isinstance(weights, ScaledWeights):
                found[-1] += weights.scales.scale.tolist()
    assert training.tape.num_replays == _STEPS - warmup_steps
    training.run.close()
    return found


def _train_in_fp8_in_each_way() -> dict[tuple[str, str, int, int], list[list[float]]]:
    return {
        (recipe, strategy, order, warmup): _train_in_fp8(recipe, strategy, order, warmup)
        for recipe, strategy, order in (
            ("delayed", "optim_grads_params", 0),
            ("delayed", "optim_grads_params", 1),
            ("delayed", "optim", 1),
            ("tensorwise", "optim_grads_params", 0),
        )
        for warmup in (3, _STEPS)
    }


def test_replays_scale_weights_in_bytes_as_eager_steps_do() -> None:
    """To the last bit, also where eager updates write bytes themselves, and evaluations come between replays."""
    for found in run_ranks(2, _train_in_fp8_in_each_way):
        for (*way, warmup), losses in found.items():
            recipe, strategy, order = way
            assert losses == found[recipe, strategy, order, _STEPS], (way, warmup)


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> object:
    """A training on one rank, whose third step will be captured."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    made = _Training(warmup_steps=2)
    yield made
    made.run.close()
    dist.destroy_process_group()


def _capture(training: _Training) -> None:
    for iteration in range(3):
        training.train(iteration, 1)
    assert training.run.is_captured


def _capture_with_streams() -> tuple[list[str], int]:
    """(broken rules, waits within the capture)."""
    streams = CaptureStreams()
    with patch.object(context_module, "make_streams", lambda device, **_: streams):
        training = _Training(warmup_steps=2, streams=streams)
        for iteration in range(5):
            training.train(iteration, 2)
            training.evaluate()
            if iteration == 1:  # the capture is next
                training.run.contexts[0].prepare_forward()
        training.run.close()
    return streams.faults, streams.num_waits


def test_no_wait_crosses_the_bounds_of_a_capture() -> None:
    """All streams join it and are joined at its end, updates beside the forward too; later forwards wait for their own."""
    for faults, num_waits in run_ranks(2, _capture_with_streams):
        assert faults == [] and num_waits > 20


def test_results_outlive_the_next_replay(training: _Training) -> None:
    _capture(training)
    first = training.train(3, 1)
    value = first.item()
    assert training.train(4, 1).item() != value and first.item() == value


def test_weights_written_between_replays_are_refused(training: _Training) -> None:
    """The graph reads what its last replay wrote; after a load in between it would train from the old weights."""
    _capture(training)
    training.evaluate()
    training.train(3, 1)
    weights = {name: value.full_tensor().clone() for name, value in training.model.state_dict().items()}
    training.model.load_state_dict(weights)
    with pytest.raises(RuntimeError, match=r"weights must not be written between the replays.*load before the first"):
        training.train(4, 1)


def test_weights_loaded_before_the_capture_are_trained_on(training: _Training) -> None:
    other = _Training(warmup_steps=9)
    other.train(0, 1)
    weights = {name: value.full_tensor().clone() for name, value in other.model.state_dict().items()}
    other.run.close()
    training.model.load_state_dict(weights)
    reference = _Training(warmup_steps=9)
    reference.model.load_state_dict(weights)
    losses = [(training.train(i, 1).item(), reference.train(i, 1).item()) for i in range(5)]
    reference.run.close()
    assert training.tape.num_replays == 3
    assert [mine for mine, _ in losses] == [theirs for _, theirs in losses]


def test_a_state_saved_between_replays_is_that_of_eager_training(training: _Training) -> None:
    reference = _Training(warmup_steps=9)
    for iteration in range(5):
        training.train(iteration, 1)
        reference.train(iteration, 1)
    mine, theirs = training.optimizer.state_dict()["state"], reference.optimizer.state_dict()["state"]
    for index, entries in theirs.items():
        for key, value in entries.items():
            assert torch.equal(_local(mine[index][key]), _local(value)), key
    assert float(mine[0]["step"]) == 5
    reference.run.close()


def _local(tensor: Tensor) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def test_the_graph_keeps_its_arenas_when_the_engine_plans_anew(training: _Training) -> None:
    """Evaluations in another order, twice, move the engine's buffers; the graph's addresses must stay taken."""
    training.run.close()
    training = _Training(warmup_steps=2, grad_divisor=2)  # gradients that are scaled have reduce-scatter inputs
    _capture(training)
    context = training.run.contexts[0]
    arenas = [weakref.ref(arena) for arena in context.planner.arenas]
    assert arenas, "of gradients: one rank gathers nothing"
    context.planner.leave_plan()
    assert not context.planner.arenas
    gc.collect()
    assert all(ref() is not None for ref in arenas)
    training.evaluate()
    assert training.train(3, 1).isfinite()
    training.run.close()


def test_a_step_out_of_plan_is_not_captured_yet(training: _Training, caplog: pytest.LogCaptureFixture) -> None:
    """Buffers are about to move; the step after it is captured."""
    training.train(0, 1)
    training.train(1, 1)
    training.run.contexts[0].planner.in_plan = False
    training.train(2, 1)
    assert not training.run.is_captured and "not captured yet" in caplog.text
    training.train(3, 1)
    assert training.run.is_captured


_X, _Y = torch.zeros(2, 3), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([{"x": _X, "y": _Y}], "takes 2 microbatches.*got 1"),
        ([{"x": _X, "y": _Y}, {"x": _X}], r"must keep their tensors \['x', 'y'\], got \['x'\] in microbatch 1"),
        ([{"x": _X, "y": _Y}, {"x": _X[:1], "y": _Y}], r"x of microbatch 1 must be \[2, 3\] of torch.float32, got \[1, 3\]"),
        ([{"x": _X, "y": _Y.int()}, {"x": _X, "y": _Y}], r"y of microbatch 0 must be \[4\] of torch.int64, got \[4\] of"),
    ],
)  # fmt: skip
def test_inputs_of_other_shapes_are_refused(given: list[Microbatch], message: str) -> None:
    """A copy into a buffer would broadcast or cast them silently."""
    inputs = StaticInputs([{"x": _X, "y": _Y}] * 2)
    with pytest.raises(ValueError, match=message):
        inputs.fill(given)


def test_inputs_are_copied_to_where_the_first_ones_lie() -> None:
    inputs = StaticInputs([{"x": _X}] * 2)
    addresses = [one["x"].data_ptr() for one in inputs.microbatches]
    inputs.fill([{"x": torch.full((2, 3), 5.0)}, {"x": torch.full((2, 3), 7.0)}])
    assert [one["x"].data_ptr() for one in inputs.microbatches] == addresses
    assert [one["x"].mean().item() for one in inputs.microbatches] == [5.0, 7.0]


def test_a_closed_step_is_not_run(training: _Training) -> None:
    training.run.close()
    with pytest.raises(RuntimeError, match="after close"):
        training.train(0, 1)


def test_the_cpu_has_no_graphs() -> None:
    with pytest.raises(ValueError, match=r"needs a CUDA device, got cpu"):
        CudaStepGraph(torch.device("cpu"), num_microbatches=1)


def test_one_eager_step_is_too_few() -> None:
    with pytest.raises(ValueError, match="at least 2, got 1"):
        FullCudaGraphConfig(enabled=True, warmup_steps=1)


def test_a_value_read_on_the_host_is_an_error_of_the_capture(training: _Training) -> None:
    """All replays would use the value of the capture."""
    step = training.step

    def reads(microbatches: Sequence[Microbatch], draw: Callable[[int], None]) -> dict[str, Tensor]:
        results = step(microbatches, draw)
        if training.run.num_eager_steps == 2 and results["loss"] > 1e9:
            raise AssertionError
        return results

    training.run.step = reads
    training.train(0, 1)
    with pytest.raises(RuntimeError, match="must not read values on the host"):
        for iteration in range(1, 4):
            training.train(iteration, 1)
