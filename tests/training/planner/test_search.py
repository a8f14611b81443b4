"""The splits that fit, fastest first: planned by models of few layers, and the best ones whole."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.training.planner import Split, Wish, rates_of, search, table
from megatron.training.planner.search import without_split

_FLAGS = [
    "--num-layers",
    "4",
    "--hidden-size",
    "64",
    "--num-attention-heads",
    "4",
    "--seq-length",
    "64",
    "--max-position-embeddings",
    "64",
    "--micro-batch-size",
    "2",
    "--global-batch-size",
    "4",
    "--train-iters",
    "2",
    "--lr",
    "1e-3",
    "--bf16",
    "--use-megatron-fsdp",
    "--data-parallel-sharding-strategy",
    "optim",
    "--mock-data",
    "--tokenizer-type",
    "NullTokenizer",
    "--vocab-size",
    "1000",
    "--tensor-model-parallel-size=2",
    "--sequence-parallel",
]


def _wish(world_size: int = 4) -> Wish:
    rates = replace(rates_of("h200"), devices_of_host=2)
    return Wish(flags=tuple(_FLAGS), world_size=world_size, vocab_size=1000, rates=rates)


def test_the_split_of_the_line_is_replaced() -> None:
    line = "--num-layers 4 --micro-batch-size 2 --tensor-model-parallel-size=2 --sequence-parallel --train-iters 2"
    assert without_split(line.split()) == ["--num-layers", "4", "--train-iters", "2"]
    settings = _wish().settings(Split(tensor=1, pipeline=2, micro_batch=1, recomputes=True))
    assert settings is not None and settings.grid.pipeline_model_parallel_size == 2
    assert settings.batch.micro_batch_size == 1 and settings.model.transformer.recompute_granularity == "full"


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


def test_nothing_fits_on_devices_without_memory() -> None:
    wish = _wish(world_size=1)
    assert search(replace(wish, rates=replace(wish.rates, memory_nbytes=1000)), workers=1) == []
