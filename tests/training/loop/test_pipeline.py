"""Training on sharded pipeline stages: the numbers of one process, and the number of gathers and live graphs."""

from __future__ import annotations

import functools
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.pipeline_parallel.stage_schedules import one_forward_one_backward
from tests.support.launch import run_ranks
from tests.support.pipeline_runs import LAYERS, Case, Outcome, train, train_plainly

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
# Sums of fp32 numbers in another order: of microbatches, of ranks, and of the two ends of a tied weight.
CLOSE: dict[str, Any] = {"rel": 1e-5, "abs": 1e-7}

TWO_STAGES = [
    Case(strategy=strategy, microbatches=microbatches, tied=tied)
    for strategy, microbatches, tied in product(STRATEGIES, (1, 2, 4), (False, True))
]
TWO_BY_TWO = [
    Case(strategy=strategy, microbatches=microbatches, replicas=2, tied=microbatches != 2, evaluates=microbatches == 2)
    for strategy, microbatches in product(STRATEGIES, (1, 2, 4))
]
FOUR_STAGES = [
    Case(stages=4, strategy=strategy, microbatches=microbatches, tied=microbatches == 4)
    for strategy, microbatches in product(STRATEGIES, (1, 2, 4))
]
FOUR_BY_TWO = [Case(stages=4, replicas=2, microbatches=4)]
PER_TOKEN = [
    Case(per_token=True, clip=0.1, microbatches=3),
    Case(per_token=True, clip=0.1, microbatches=3, tied=True),
    Case(per_token=True, clip=0.1, replicas=2, tied=True),
]
RECOMPUTED = [
    Case(microbatches=3, tied=True, recompute="uniform"),
    Case(replicas=2, recompute="block"),
]
KEPT = [Case(budget=1e9, replicas=2, steps=4, evaluates=True), Case(budget=1e9, replicas=2, strategy="optim", steps=4)]
PEER_COPY = [
    Case(transport="peer_copy", replicas=2, microbatches=4, tied=True, evaluates=True, strategy=strategy)
    for strategy in ("optim", "optim_grads_params")
]
AHEAD = [
    Case(ahead=10**5, replicas=2, microbatches=5, steps=4, evaluates=True),
    Case(ahead=3000, replicas=2, microbatches=5, steps=4),
]
TURNS = [
    Case(virtual=2, replicas=2, microbatches=4, tied=True, overlaps=True, evaluates=True),
    Case(virtual=2, microbatches=5, group=3, overlaps=True),
    Case(virtual=2, microbatches=2, strategy="optim", per_token=True, clip=0.1),
    Case(virtual=2, microbatches=4, strategy="no_shard", recompute="uniform", tied=True),
]
TURNS_KEPT = [Case(virtual=2, replicas=2, budget=1e9, steps=4, evaluates=True, overlaps=True)]
ALL = [
    *TURNS,
    *TURNS_KEPT,
    *TWO_STAGES,
    *TWO_BY_TWO,
    *FOUR_STAGES,
    *FOUR_BY_TWO,
    *PER_TOKEN,
    *RECOMPUTED,
    *KEPT,
    *PEER_COPY,
    *AHEAD,
]


@functools.cache
def _runs(num_ranks: int) -> dict[Case, list[Outcome]] | str:
    """Run all cases of this number of ranks in one launch; return each rank's outcomes, or the failure."""
    cases = [case for case in ALL if case.num_ranks == num_ranks]
    try:
        ranks = run_ranks(num_ranks, _train_cases, cases, timeout_s=300.0)
    except AssertionError as failure:
        return str(failure)
    return {case: [rank[index] for rank in ranks] for index, case in enumerate(cases)}


def _train_cases(cases: list[Case]) -> list[Outcome]:
    return [train(case) for case in cases]


def outcomes_of(case: Case) -> list[Outcome]:
    runs = _runs(case.num_ranks)
    assert not isinstance(runs, str), runs
    return runs[case]


def plain_outcome_of(case: Case) -> Outcome:
    """Return the outcome of one process, computed once for all cases that must agree."""
    return _plain(
        Case(
            microbatches=case.microbatches * case.replicas,
            tied=case.tied,
            per_token=case.per_token,
            clip=case.clip,
            steps=case.steps,
            evaluates=case.evaluates,
        )
    )


_plain = functools.cache(train_plainly)


def label(case: Case) -> str:
    parts = [f"pp{case.stages}", f"dp{case.replicas}", case.strategy, f"M{case.microbatches}"]
    flags = ("tied", "per_token", "budget", "ahead", "recompute", "evaluates")
    parts += [name for name in flags if getattr(case, name)]
    parts += [f"vp{case.virtual}"] * (case.virtual > 1)
    return "-".join([*parts, *([case.transport] if case.transport != "nccl" else [])])


@pytest.mark.parametrize("case", ALL, ids=label)
def test_stages_train_as_one_process_does(case: Case) -> None:
    expected, weights = plain_outcome_of(case), {}
    for outcome in outcomes_of(case):
        assert outcome.losses == pytest.approx(expected.losses, **CLOSE)
        assert outcome.norms == pytest.approx(expected.norms, **CLOSE)
        assert outcome.evaluations == pytest.approx(expected.evaluations, **CLOSE)
        weights.update(outcome.weights)
    copies = {"output_layer.weight"} if case.tied else set()
    assert weights.keys() == expected.weights.keys() | copies
    for name, values in weights.items():
        own = expected.weights["embedding.word_embeddings.weight" if name in copies else name]
        np.testing.assert_allclose(values, own, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("case", [*TURNS, *TWO_STAGES, *TWO_BY_TWO, *FOUR_STAGES, *AHEAD, *RECOMPUTED], ids=label)
def test_steps_follow_the_plan_from_the_second_on(case: Case) -> None:
    """The order of a 1F1B step is the same every time: nothing is gathered on demand in it."""
    for outcome in outcomes_of(case):
        assert all(outcome.in_plan[1:])


@pytest.mark.parametrize(
    "case", [c for c in (*TWO_STAGES, *TWO_BY_TWO, *FOUR_STAGES, *FOUR_BY_TWO) if c.is_sharded], ids=label
)
def test_weights_are_gathered_once_for_each_pass_and_not_again_where_passes_meet(case: Case) -> None:
    """Where forward turns into backward, or backward into forward, the unit that ends the one begins the other.

    A rank that has a stage to itself gathers nothing.
    """
    for rank, outcome in enumerate(outcomes_of(case)):
        if case.replicas == 1:
            assert not any(outcome.gathers)
            continue
        stage, layers = rank // case.replicas, ["layer"] * (LAYERS // case.stages)
        units = [*(["embedding"] if stage == 0 else []), *layers]
        sizes = outcome.num_groups
        if stage == case.stages - 1:
            # Each microbatch is a plan of its own. The root, which has the final norm, and the output layer end forward.
            units = [*layers, "output_layer", "root"]
            expected = case.microbatches * (
                2 * sum(sizes[unit] for unit in units) - sizes["output_layer"] - sizes["root"]
            )
        else:
            expected = _num_gathers(case, stage, units, sizes)
        assert outcome.gathers[1:] == [expected] * (case.steps - 1), (rank, outcome.gathers)


def _num_gathers(case: Case, stage: int, units: list[str], sizes: dict[str, int]) -> int:
    """Count the gathers of a step on a stage before the last: one for each use of a unit unless it was the unit just used."""
    uses: list[int] = []
    for act in one_forward_one_backward(stage, case.stages, case.microbatches).acts:
        order = range(len(units))
        uses += order if act.is_forward else reversed(order)
    gathered = [uses[0], *(use for before, use in pairwise(uses) if use != before)]
    return sum(sizes[units[use]] for use in gathered)


@pytest.mark.parametrize("case", [*KEPT, *TURNS_KEPT], ids=label)
def test_a_budget_keeps_weights_for_the_whole_step(case: Case) -> None:
    for outcome in outcomes_of(case):
        expected = outcome.num_groups["all"] if case.is_sharded else 0
        assert outcome.gathers[1:] == [expected] * (case.steps - 1)


@pytest.mark.parametrize("case", [*TURNS, *TWO_STAGES, *TWO_BY_TWO, *FOUR_STAGES], ids=label)
def test_gradients_are_reduced_as_placements_say(case: Case) -> None:
    """Sharded gradients with each microbatch, partial sums with the last one alone; those of one rank as sharded ones."""
    adds = case.replicas == 1 or case.strategy in ("optim_grads", "optim_grads_params")
    passes = case.microbatches if adds else 1
    for outcome in outcomes_of(case):
        assert outcome.reductions == [passes * outcome.num_groups["all"]] * case.steps


@pytest.mark.parametrize("case", [*TWO_STAGES, *TWO_BY_TWO, *FOUR_STAGES], ids=label)
def test_no_more_graphs_are_alive_than_the_schedule_says(case: Case) -> None:
    """A graph that is kept after its backward keeps its activations; a sent output must be freed too."""
    for rank, outcome in enumerate(outcomes_of(case)):
        assert outcome.most_outputs == 0
        assert outcome.most_in_flight == min(case.stages - rank // case.replicas, case.microbatches)


@pytest.mark.parametrize("case", TURNS, ids=label)
def test_stages_that_take_turns_keep_the_graphs_of_the_warm_up(case: Case) -> None:
    """The last virtual stage of the last rank alone begins the backward of a forward at once."""
    for rank, outcome in enumerate(outcomes_of(case)):
        warm_up = 2 * (case.stages - rank // case.replicas - 1) + (case.virtual - 1) * (case.group or case.stages)
        assert outcome.most_outputs == 0
        assert outcome.most_in_flight == min(warm_up + 1, case.virtual * case.microbatches)


@pytest.mark.gpu(2)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_stages_over_nccl_train_as_one_process_does() -> None:
    cases = [Case(microbatches=m, tied=tied, evaluates=True) for m, tied in product((1, 4), (False, True))]
    cases += [Case(virtual=2, microbatches=m, tied=True, evaluates=True, overlaps=m > 2) for m in (2, 6)]
    ranks = run_ranks(2, _train_cases, cases, backend="nccl")
    for index, case in enumerate(cases):
        expected = plain_outcome_of(case)
        for outcomes in ranks:
            # The device sums in another order than the CPU, and fp32 products there may be rounded to TF32 or not.
            assert outcomes[index].losses == pytest.approx(expected.losses, rel=2e-3)
            assert outcomes[index].evaluations == pytest.approx(expected.evaluations, rel=2e-3)
            assert outcomes[index].norms == pytest.approx(expected.norms, rel=2e-2)
            assert all(outcomes[index].in_plan[1:])
