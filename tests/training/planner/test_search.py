"""The splits that fit, fastest first: planned by models of few layers, and the best ones whole."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch

from megatron.training.arguments import Settings, check_command_line
from megatron.training.planner import DeviceRates, Split, Wish, rates_of, search, table
from megatron.training.planner.few_layers import FewLayers, few_layers
from megatron.training.planner.rank import Care
from megatron.training.planner.search import Found, without_split
from tests.training.planner.tiny_runs import EXPERTS, SMALLEST

_FLAGS = f"{SMALLEST} --num-layers 4 --micro-batch-size 2 --global-batch-size 4 --tensor-model-parallel-size=2 --sequence-parallel".split()

# ``megatron.training.planner.search`` is the function.
searching = sys.modules["megatron.training.planner.search"]


def _wish(world_size: int = 4) -> Wish:
    rates = replace(rates_of("h200"), devices_of_host=2)
    return Wish(flags=tuple(_FLAGS), world_size=world_size, vocab_size=1000, rates=rates)


def test_the_split_of_the_line_is_replaced() -> None:
    line = "--num-layers 4 --micro-batch-size 2 --tensor-model-parallel-size=2 --sequence-parallel --train-iters 2"
    assert without_split(line.split()) == ["--num-layers", "4", "--train-iters", "2"]
    settings = _wish().settings(Split(tensor=1, pipeline=2, micro_batch=1, recomputes=True))
    assert settings is not None and settings.grid.pipeline_model_parallel_size == 2
    assert settings.batch.micro_batch_size == 1 and settings.model.transformer.recompute_granularity == "full"


def test_a_last_stage_of_fewer_layers_is_part_of_the_split() -> None:
    """Of a model of 61 layers, too: all but one of its numbers of stages would be left out."""
    line = "--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers=1 --account-for-loss-in-pipeline-split --lr 1"
    assert without_split(line.split()) == ["--lr", "1"]
    wish = replace(_wish(), flags=(*_FLAGS, "--num-layers", "5"))
    of_stages = {
        split.pipeline: split.last_stage
        for family in searching._families(wish)
        for splits in family
        for split in splits
    }
    assert of_stages == {1: None, 2: 2}  # of four stages, 2, 2 and 1, nothing is left for the last one
    uneven = Split(pipeline=2, last_stage=2)
    whole, small = wish.settings(uneven), wish.settings(uneven, ("--num-layers", "4"))
    assert whole is not None and whole.model.transformer.num_layers_in_last_pipeline_stage == 2
    assert small is not None and small.model.transformer.num_layers_in_last_pipeline_stage is None
    assert "last stage: 2 layers" in table(
        [Found(split=uneven, step_seconds=1.0, device_nbytes=1, tokens_per_second=1.0)]
    )


@pytest.mark.slow
def test_splits_are_found_fastest_first_and_drawn_out_ones_are_near() -> None:
    found = search(_wish(), workers=1, num_exact=2)
    assert len(found) > 5 and [row.step_seconds for row in found] == sorted(row.step_seconds for row in found)
    assert {row.split.tensor for row in found} == {1, 2} and {row.split.pipeline for row in found} >= {1, 2}
    exact = search(_wish(), workers=1, num_exact=len(found))
    drawn = {row.split: row for row in found if not row.is_exact}
    pairs = [(drawn[row.split], row) for row in exact if row.split in drawn]
    assert pairs and all(near.device_nbytes == pytest.approx(row.device_nbytes, rel=0.02) for near, row in pairs)
    assert "about" in table(found)


@dataclass(frozen=True)
class _Plan:
    step_seconds: float
    microbatch_seconds: float
    bubble_seconds: float
    device_nbytes: int


def test_a_search_plans_each_split_by_few_layers_and_the_best_ones_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a search over 16,384 devices costs, in plans: they were five times as many, of which whole models where layers differ."""
    planned: list[tuple[Care, int]] = []

    def plan(settings: Settings, rates: DeviceRates, *, vocab_size: int, care: Care) -> _Plan:
        config, batch = settings.model.transformer, settings.batch
        planned.append((care, config.num_layers // config.pipeline_model_parallel_size))
        of_stage = config.num_layers // config.pipeline_model_parallel_size
        micro = of_stage * (1 / config.tensor_model_parallel_size + 0.2) * batch.micro_batch_size
        micro *= 1 + 0.2 * abs(config.expert_model_parallel_size - 2)
        return _Plan(
            step_seconds=micro * (batch.num_microbatches + config.pipeline_model_parallel_size - 1),
            microbatch_seconds=micro,
            bubble_seconds=micro * (config.pipeline_model_parallel_size - 1),
            device_nbytes=of_stage * batch.micro_batch_size * 10**9 // (5 if config.recompute_granularity else 1),
        )

    monkeypatch.setattr(searching, "plan_run", plan)
    rates = replace(rates_of("h200"), devices_of_host=2, memory_nbytes=35 * 10**9)
    flags = (
        f"{SMALLEST} {EXPERTS} --num-layers 30 --moe-layer-freq [0]*4+[1]*26 --num-experts 4 --global-batch-size 32768"
    )
    found = search(
        Wish(flags=tuple(flags.split()), world_size=16_384, vocab_size=1000, rates=rates), num_best=4, workers=1
    )
    best = found[0].split
    assert (best.tensor, best.pipeline, best.experts, best.micro_batch, best.recomputes) == (1, 1, 2, 1, False)
    assert [row.step_seconds for row in found] == sorted(row.step_seconds for row in found) and len(found) == 4
    assert all(row.device_nbytes <= rates.memory_nbytes for row in found)
    of_care = Counter(care for care, layers in planned if layers < 30)
    whole = [care for care, layers in planned if layers == 30]
    # Roughly: at most two plans for each of two tensor-parallel sizes, three expert-parallel ones and two micro batches.
    assert of_care[Care.ROUGH] <= 2 * 2 * 3 * 2 and of_care[Care.STEADY] <= 2 * (2 * 2 * 4 + 2 * 2)
    assert {layers for _, layers in planned} == {6, 7, 30} and whole == [Care.STEADY] * 2


def _few_layers(flags: str, stages: int = 1) -> FewLayers | None:
    line = check_command_line([*SMALLEST.split(), *flags.split()], world_size=1, paths_exist=False)
    assert line.settings is not None, line.faults
    return few_layers(line.settings.model.transformer, stages)


def test_few_layers_have_all_kinds_of_the_models_layers() -> None:
    alike = FewLayers(few=("--num-layers", "4"), more=("--num-layers", "6"), further=14.0)
    assert _few_layers("--num-layers 32", stages=2) == alike
    fourth = FewLayers(few=("--num-layers", "4"), more=("--num-layers", "8"), further=11.0)
    assert _few_layers(f"--num-layers 48 {EXPERTS} --moe-layer-freq 4") == fourth
    dense_first = FewLayers(
        few=("--num-layers", "5", "--moe-layer-freq", "[0,0,0,1,1]"),
        more=("--num-layers", "6", "--moe-layer-freq", "[0,0,0,1,1,1]"),
        further=56.0,
    )
    assert _few_layers(f"--num-layers 61 {EXPERTS} --moe-layer-freq [0]*3+[1]*58") == dense_first
    stages = _few_layers(f"--num-layers 12 {EXPERTS} --moe-layer-freq [0]*2+[1]*10", stages=2)
    assert stages is not None and stages.few == ("--num-layers", "8", "--moe-layer-freq", "[0,0,1,1,1,1,1,1]")
    uneven = _few_layers(f"--num-layers 22 {EXPERTS} --moe-layer-freq [0]+[1]*21", stages=4)  # 6, 6, 6 and 4
    assert uneven is not None and uneven.few == ("--num-layers", "12", "--moe-layer-freq", f"[0,{','.join('1' * 11)}]")
    assert uneven.more[1] == "16" and uneven.further == 3.0
    in_turn = _few_layers(f"--num-layers 13 {EXPERTS} --moe-layer-freq [0]+[0,1]*6")
    assert in_turn is not None and in_turn.few == ("--num-layers", "3", "--moe-layer-freq", "[0,0,1]")
    assert in_turn.more[1] == "5" and in_turn.further == 5.0


def test_small_models_are_planned_whole() -> None:
    assert _few_layers("--num-layers 3") is None
    assert _few_layers(f"--num-layers 6 {EXPERTS} --moe-layer-freq [0,1,1,0,1,0]") is None


@pytest.mark.slow
def test_nothing_fits_on_devices_without_memory() -> None:
    wish = _wish(world_size=1)
    assert search(replace(wish, rates=replace(wish.rates, memory_nbytes=1000)), workers=1) == []


def _num_threads(_: int) -> int:
    return torch.get_num_threads()


def test_processes_of_a_search_compute_with_a_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """They took the cores from each other: a search over 16,384 devices took 172 s on two cores, 109 with a thread each."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with searching._each_by(2) as each:
        assert each(_num_threads, [0]) == [1]
