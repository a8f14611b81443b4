"""Plans of whole runs, beside what was measured of others."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megatron.training.arguments import check_command_line
from megatron.training.planner import RunPlan, describe, plan_run, rates_of
from tests.training.planner.tiny_runs import EXPERTS, TINY

_GRAPH = "--cuda-graph-impl full_iteration --distributed-backend nccl"
_ENGINE = "--bf16 --data-parallel-sharding-strategy optim_grads_params"
_OVERLAP = "--overlap-grad-reduce --overlap-param-gather"


def _plan(flags: str, world_size: int = 2, *, overlap: str = _OVERLAP) -> RunPlan:
    words = f"{TINY} {_ENGINE} {overlap} {flags}".split()
    line = check_command_line(words, world_size=world_size, paths_exist=False)
    assert line.settings is not None, line.faults
    return plan_run(line.settings, rates_of("h200"))


def test_a_captured_step_waits_for_no_host() -> None:
    """Its replay is one launch; its memory is that of an eager step, and workspaces of the stream on which it was captured."""
    eager, graph = _plan(""), _plan(_GRAPH)
    assert eager.slowest.host > 0.5 * eager.step_seconds and graph.slowest.host == 0
    assert graph.slowest.compute == eager.slowest.compute and graph.step_seconds < 0.5 * eager.step_seconds
    assert graph.peak_nbytes == eager.peak_nbytes + graph.rates.graph_nbytes
    assert "one CUDA graph" in describe(graph) and "CUDA graph" not in describe(eager)


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ("--fp8-dot-product-attention", "attention in FP8 is planned as if it were in bf16"),
        ("--use-transformer-engine-op-fuser", "the MLP's activation, which is written in FP8, is planned"),
    ],
)
def test_what_is_not_planned_in_fp8_is_said(flags: str, note: str) -> None:
    fp8 = "--transformer-impl transformer_engine --fp8-format hybrid"
    assert note in describe(_plan(f"{fp8} {flags}")) and "planned as if" not in describe(_plan(fp8))


def test_peer_copy_takes_whole_pages_and_room_for_pieces() -> None:
    shared, by_nccl = _plan("--fsdp-transport peer_copy --distributed-backend nccl"), _plan("")
    more = shared.peak_nbytes - by_nccl.peak_nbytes
    assert more > 2**26 and more % 512 == 0 and shared.fullest.peak_nbytes == by_nccl.fullest.peak_nbytes
    # Weights and staging of two layers and what is around them, in pages of 2 MiB.
    assert more < 2**26 + 12 * 2**21


def test_passes_that_take_turns_keep_two_microbatches_in_memory() -> None:
    flags = f"{EXPERTS} --expert-model-parallel-size 2 --global-batch-size 12"
    plain, turns = _plan(flags), _plan(f"{flags} --overlap-moe-expert-parallel-comm")
    assert turns.slowest.compute == pytest.approx(plain.slowest.compute)
    assert turns.peak_nbytes > plain.peak_nbytes


_VIRTUAL = "--num-layers-per-virtual-pipeline-stage 2"


@pytest.mark.parametrize(
    ("virtual", "microbatches"),
    [
        pytest.param("", 2, marks=pytest.mark.slow),
        pytest.param("", 9, marks=pytest.mark.slow),
        pytest.param(_VIRTUAL, 2),
        pytest.param(_VIRTUAL, 12),
    ],
)
def test_each_microbatch_of_a_pipeline_counts(virtual: str, microbatches: int) -> None:
    """A pipeline begins with forwards alone: taken for whole microbatches, they made plans faster than the device's products."""
    plan = _plan(f"--num-layers 8 --pipeline-model-parallel-size 2 {virtual} --global-batch-size {2 * microbatches}")
    alone = _plan(f"--num-layers 4 --global-batch-size {4 * microbatches}").microbatch_seconds
    assert plan.microbatch_seconds == pytest.approx(alone, rel=0.3)
    bubble = min(time.microbatch for time in plan.times) / (2 if virtual else 1)
    assert plan.bubble_seconds == pytest.approx(bubble)
    assert plan.step_seconds > 0.7 * (microbatches * alone + bubble)


_LARGE = "--hidden-size 2048 --num-attention-heads 16 --ffn-hidden-size 8192 --seq-length 4096 --max-position-embeddings 4096"


def _one_forward_one_backward(stages: Sequence[float], num_microbatches: int) -> float:
    """Return when a pipeline ends whose stages take so long for a microbatch, two thirds of it in backward."""
    last = len(stages) - 1
    free = [0.0] * len(stages)
    forwards: dict[tuple[int, int], float] = {}
    backwards: dict[tuple[int, int], float] = {}
    orders = []
    for stage in range(len(stages)):
        ahead = min(last - stage, num_microbatches)
        pairs = [work for at in range(num_microbatches - ahead) for work in ((0, at + ahead), (1, at))]
        orders.append(
            [(0, at) for at in range(ahead)]
            + pairs
            + [(1, at) for at in range(num_microbatches - ahead, num_microbatches)]
        )
    while any(orders):
        for stage, order in enumerate(orders):
            while order:
                is_backward, at = order[0]
                if is_backward:
                    ready = forwards.get((stage, at)) if stage == last else backwards.get((stage + 1, at))
                else:
                    ready = 0.0 if stage == 0 else forwards.get((stage - 1, at))
                if ready is None:
                    break
                free[stage] = max(free[stage], ready) + stages[stage] * (2 if is_backward else 1) / 3
                (backwards if is_backward else forwards)[stage, at] = free[stage]
                order.pop(0)
    return max(free)


def test_stages_of_a_pipeline_are_waited_for_as_long_as_each_takes() -> None:
    """Each was taken to be as slow as the slowest one: with the products of a large vocabulary in the last, a step of few microbatches was far too long."""
    flags = f"--num-layers 8 --pipeline-model-parallel-size 4 --vocab-size 131072 {_LARGE}"
    plan = _plan(f"{flags} --global-batch-size 128", world_size=8)
    first, last = (time.microbatch for time in plan.times)
    assert last > 2 * first and plan.bubble_seconds == pytest.approx(3 * first)
    whole = _one_forward_one_backward([first, first, first, last], 16)
    assert 16 * last + plan.bubble_seconds == pytest.approx(whole, rel=0.01)
    assert whole < 0.95 * 19 * last
    uneven = "--num-layers 14 --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1"
    plan = _plan(f"{uneven} {_LARGE} --global-batch-size 64", world_size=4)
    first, middle, last = (time.microbatch for time in plan.times)
    assert plan.bubble_seconds == pytest.approx(first + middle + last)
    whole = _one_forward_one_backward([first, middle, middle, last], 16)
    assert 16 * middle + plan.bubble_seconds == pytest.approx(whole, rel=0.02)


_LLAMA = "--group-query-attention --vocab-size 32000 --cross-entropy-loss-fusion --use-precision-aware-optimizer --untie-embeddings-and-output-weights"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "measured_ms"),
    [
        pytest.param(
            "--num-layers 22 --hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 32 --num-query-groups 4 --seq-length 2048 "
            "--max-position-embeddings 2048",
            40.0,
            id="1.1B, overlap_2xh200_2026-11-23.md",
        ),
        pytest.param(
            "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --num-query-groups 8 --seq-length 1024 "
            "--max-position-embeddings 1024 --megatron-fsdp-grad-comm-dtype bf16",
            126.3,
            id="7.2B, bars_2xh200_2026-11-21.md",
        ),
    ],
)
def test_planned_time_of_a_graph_is_the_measured_one(flags: str, measured_ms: float) -> None:
    plan = _plan(f"{_LLAMA} {flags} --micro-batch-size 1 --global-batch-size 2 {_GRAPH}")
    assert plan.step_seconds * 1e3 == pytest.approx(measured_ms, rel=0.05)


def test_a_plan_has_the_overlap_that_is_in_effect() -> None:
    """The strategy decides unless a flag does: the planner runs the engine and has no separate rule."""
    asked, off = _plan(""), _plan("", overlap="--no-overlap-param-gather --no-overlap-grad-reduce")
    unasked = _plan("", overlap="")
    assert (unasked.step_seconds, unasked.peak_nbytes) == (asked.step_seconds, asked.peak_nbytes)
    assert off.peak_nbytes < asked.peak_nbytes, "one unit is unsharded at a time"


@pytest.mark.parametrize("flags", ["--global-batch-size 64", "--num-layers 4 --pipeline-model-parallel-size 2"])
def test_lines_of_the_time_add_up_to_the_step(flags: str) -> None:
    """A reader must see where the time of a step goes: each line is the sum of those that stand deeper below it."""
    lines = describe(_plan(flags)).split("time, ms\n")[1].splitlines()
    rows = [(len(line) - len(line.lstrip()), float(line.split()[-1])) for line in lines]
    step = rows[0][1]
    below = [row for row in rows if row[0] > 2]
    assert sum(value for depth, value in below if depth == 4) == pytest.approx(step, abs=0.2)
    assert sum(value for depth, value in below if depth == 6) == pytest.approx(below[0][1], abs=0.25)
    assert len(below) >= 6, "microbatches that are not run, or the pipeline's waiting, are lines too"


def test_stages_between_the_first_and_the_last_one_are_planned_where_they_have_other_layers() -> None:
    """The middle of a pipeline is fullest and slowest where the ends have fewer layers, or layers without experts."""
    uneven = "--num-layers 14 --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1"
    plan = _plan(f"{uneven} --global-batch-size 16", world_size=4)
    assert [rank.rank for rank in plan.ranks] == [0, 1, 3]
    assert plan.fullest.rank == plan.slowest_rank.rank == 1
    even = _plan("--num-layers 8 --pipeline-model-parallel-size 4 --global-batch-size 16", world_size=4)
    assert [rank.rank for rank in even.ranks] == [0, 3]
    experts = f"{EXPERTS} --moe-layer-freq [0]*2+[1]*6 --moe-ffn-hidden-size 160"
    of_experts = _plan(
        f"--num-layers 8 {experts} --pipeline-model-parallel-size 4 --global-batch-size 16", world_size=4
    )
    assert [rank.rank for rank in of_experts.ranks] == [0, 1, 3] and of_experts.fullest.rank == 1
