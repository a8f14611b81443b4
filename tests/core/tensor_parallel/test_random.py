"""Tensor-parallel ranks draw different dropout for parts, the same for whole tensors, and again in recomputation."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import (
    MODEL_PARALLEL_STREAM,
    CudaRNGStatesTracker,
    rng_tracker_of,
    seed_streams,
)
from tests.support.launch import run_ranks
from tests.support.tiny_gpt import build_gpt, random_tokens

CPU = torch.device("cpu")


def _draw() -> list[float]:
    return torch.rand(3).tolist()


def test_a_microbatch_seeds_no_kind_of_device_that_is_not_in_use() -> None:
    """torch.manual_seed does, and formats the stack for each, which costs the host time in each microbatch."""
    torch.manual_seed(3)
    expected = _draw()
    unused = AssertionError("a kind of device is seeded that no training uses")
    with (
        patch("torch.xpu.manual_seed_all", side_effect=unused),
        patch("torch.mtia.manual_seed_all", side_effect=unused),
    ):
        seed_streams(3)
    assert _draw() == expected


def test_a_fork_draws_from_its_own_stream_and_leaves_torchs_where_it_was() -> None:
    trackers = [CudaRNGStatesTracker(rank) for rank in range(2)]
    torch.manual_seed(3)
    expected = [_draw() for _ in range(2)]
    drawn = []
    for tracker in trackers:
        seed_streams(3, tracker)
        before = _draw()
        with tracker.fork(device=CPU):
            drawn.append(_draw())
        assert [before, _draw()] == expected
        with tracker.fork(device=CPU):
            drawn.append(_draw())
    assert len({tuple(values) for values in drawn + expected}) == 6, "every stream goes on, and no two are alike"


def test_the_same_seed_gives_a_rank_the_same_stream() -> None:
    def stream(rank: int, seed: int) -> list[float]:
        tracker = CudaRNGStatesTracker(rank)
        with tracker.fork(device=CPU):
            _draw()
        seed_streams(seed, tracker)
        with tracker.fork(device=CPU):
            return _draw()

    assert stream(1, 5) == stream(1, 5)
    assert stream(1, 5) != stream(0, 5) and stream(1, 5) != stream(1, 6)
    assert CudaRNGStatesTracker(1).own_seed(5) == 7457673429678295979, "earlier checkpoints resume with these streams"


def test_an_exception_in_a_fork_leaves_torchs_stream_where_it_was() -> None:
    tracker = CudaRNGStatesTracker()
    state = torch.get_rng_state()
    with pytest.raises(KeyError), tracker.fork(device=CPU):
        torch.rand(1)
        raise KeyError
    assert torch.equal(torch.get_rng_state(), state)


def test_states_are_kept_and_restored() -> None:
    tracker = CudaRNGStatesTracker()
    tracker.add("other", 7)
    with tracker.fork(device=CPU):
        _draw()
    states = tracker.get_states()

    def both() -> list[list[float]]:
        drawn = []
        for name in ("model-parallel-rng", "other"):
            with tracker.fork(name, CPU):
                drawn.append(_draw())
        return drawn

    expected = both()
    tracker.set_states(states)
    assert both() == expected
    with pytest.raises(ValueError, match="a name of its own, got 'other'"):
        tracker.add("other", 8)
    with (
        pytest.raises(RuntimeError, match="must be added before it is forked, got 'third'"),
        tracker.fork("third", CPU),
    ):
        pass
    tracker.reset()
    with pytest.raises(RuntimeError, match="got 'other'"), tracker.fork("other", CPU):
        pass


def test_a_model_that_is_not_split_has_no_tracker() -> None:
    assert rng_tracker_of(build_gpt()) is None


def _build(sequence_parallel: bool, **fields: Any) -> torch.nn.Module:
    fields = {
        "tensor_model_parallel_size": dist.get_world_size(),
        "sequence_parallel": sequence_parallel,
        "hidden_dropout": 0.3,
        "attention_dropout": 0.3,
        "attention_backend": "unfused",
        "init_method_std": 0.3,
        **fields,
    }
    return build_gpt({"pg_collection": ProcessGroupCollection(tp=dist.group.WORLD)}, **fields)


def _dropped(sequence_parallel: bool) -> list[tuple[int, bool]]:
    """Return (dims of the tensor, whether all ranks drop the same) of each dropout of a forward pass."""
    model = _build(sequence_parallel)
    seed_streams(11, rng_tracker_of(model))
    inputs, positions, labels = random_tokens(length=8)
    masks: list[torch.Tensor] = []
    dropout = F.dropout

    def recorded(x: torch.Tensor, p: float, training: bool) -> torch.Tensor:
        masks.append(dropout(torch.ones_like(x), p, training))
        return x

    with patch.object(F, "dropout", recorded):
        model(inputs, positions, None, labels=labels)
    same = []
    for mask in masks:
        others = [torch.empty_like(mask) for _ in range(dist.get_world_size())]
        dist.all_gather(others, mask)
        same.append((mask.dim(), all(torch.equal(mask, other) for other in others)))
    return same


def _all_dropped() -> list[list[tuple[int, bool]]]:
    return [_dropped(sequence_parallel) for sequence_parallel in (False, True)]


def test_ranks_drop_alike_what_all_of_them_have_and_apart_what_each_has_a_part_of() -> None:
    """Attention probabilities have 4 dims, hidden states 3. The embedding's dropout is the first."""
    whole, parts = run_ranks(2, _all_dropped)[0]
    layer = [(4, False), (3, True), (3, True)]
    assert whole == [(3, True), *layer, *layer]
    assert parts == [(dims, False) for dims, _ in whole]


def _gradients(sequence_parallel: bool, **fields: Any) -> list[list[float]]:
    model = _build(sequence_parallel, **fields)
    inputs, positions, labels = random_tokens(length=8)
    losses = []
    for seed in (11, 12):
        seed_streams(seed, rng_tracker_of(model))
        losses.append(model(inputs, positions, None, labels=labels).mean())
    (losses[0] + 2 * losses[1]).backward()
    after = torch.rand(1)
    return [*(parameter.grad.flatten().tolist() for parameter in model.parameters()), after.tolist()]


RECOMPUTED: list[dict[str, Any]] = [
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    {"recompute_granularity": "selective"},
]


def _recomputed_gradients() -> list[bool]:
    equal = []
    for sequence_parallel in (False, True):
        expected = _gradients(sequence_parallel)
        equal += [_gradients(sequence_parallel, **fields) == expected for fields in RECOMPUTED]
    return equal


def test_recomputation_drops_the_same_elements_again() -> None:
    """Bitwise, with two forwards from different seeds before their backwards, so that no stream has the state that backward needs.

    The first pass is also the first use of the tracker's stream.
    """
    assert run_ranks(2, _recomputed_gradients) == [[True] * 4] * 2


@pytest.mark.gpu
def test_forks_on_cuda_are_streams_of_their_own_and_graphs_replay_them() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    tracker = CudaRNGStatesTracker(1)
    seed_streams(3, tracker)
    expected = [torch.rand(3, device=device)]
    with tracker.fork(device=device):
        expected.append(torch.rand(3, device=device))
    expected.append(torch.rand(3, device=device))
    with tracker.fork(device=device):
        expected.append(torch.rand(3, device=device))
    assert len({tuple(values.tolist()) for values in expected}) == 4

    from megatron.core.full_cuda_graph import CudaStepGraph

    graph = CudaStepGraph(device, num_microbatches=1, tracker=tracker)

    def step() -> dict[str, torch.Tensor]:
        graph.draw(0)
        drawn = [torch.rand(3, device=device)]
        with tracker.fork(device=device):
            drawn.append(torch.rand(3, device=device))
        drawn.append(torch.rand(3, device=device))
        with tracker.fork(device=device):
            drawn.append(torch.rand(3, device=device))
        return {str(index): values for index, values in enumerate(drawn)}

    with graph.warmup():
        seed_streams(3, tracker)
    results = graph.capture(step)
    for _ in range(2):
        graph.replay([3])
        for index, values in enumerate(expected):
            assert torch.equal(results[str(index)], values)
    graph.close()
    seed_streams(3, tracker)
    assert torch.equal(torch.rand(3, device=device), expected[0])
    with tracker.fork(device=device):
        assert torch.equal(torch.rand(3, device=device), expected[1])


def test_states_are_restored_into_a_tracker_that_has_not_drawn_yet() -> None:
    """As where a run goes on: streams that the new tracker lacks are added, with their states."""
    first, second = CudaRNGStatesTracker(seed=1), CudaRNGStatesTracker(seed=2)
    first.add("experts", 5)

    def draw(tracker: CudaRNGStatesTracker) -> list[float]:
        drawn = []
        for name in ("experts", MODEL_PARALLEL_STREAM):
            with tracker.fork(name, torch.device("cpu")):
                drawn.append(float(torch.rand(())))
        return drawn

    draw(first)
    states = first.get_states()
    expected = draw(first)
    second.set_states(states)
    assert draw(second) == expected
    third = CudaRNGStatesTracker(seed=3)
    third.set_states({"other": torch.Generator().manual_seed(7).get_state()})
    with third.fork("other"):
        assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(7)))
    third.set_states({})
    with third.fork("other"):
        assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(7)))
