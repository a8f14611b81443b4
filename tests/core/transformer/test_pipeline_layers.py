"""Which layers each pipeline stage has: Megatron-Core's rules, as tables."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_layers import (
    get_num_layers_to_build,
    get_transformer_layer_offset,
    stage_of,
    stages_of,
)
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_config import TransformerConfig

EVEN, VIRTUAL = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
LAYOUT, GROUP = "pipeline_model_parallel_layout", "microbatch_group_size_per_vp_stage"


def config_of(num_layers: int, **fields: Any) -> TransformerConfig:
    return TransformerConfig(num_layers=num_layers, hidden_size=16, num_attention_heads=4, **fields)


@pytest.mark.parametrize(
    ("num_layers", "fields", "layers"),
    [
        (3, {}, "012"),
        (8, {EVEN: 2}, "0123 4567"),
        (8, {EVEN: 2, VIRTUAL: 2}, "01 23 45 67"),
        (8, {EVEN: 2, VIRTUAL: 4}, "0 1 2 3 4 5 6 7"),
        (8, {EVEN: 3, FIRST: 2}, "01 234 567"),
        (7, {EVEN: 3, LAST: 1}, "012 345 6"),
        (9, {EVEN: 2, FIRST: 4, LAST: 5}, "0123 45678"),
        (8, {EVEN: 3, FIRST: 2, LAST: 2, VIRTUAL: 2}, "0 12 3 4 56 7"),
        (7, {EVEN: 2, EMBEDDING: True}, "012 3456"),
        (7, {EVEN: 2, LOSS: True}, "0123 456"),
        (6, {EVEN: 2, EMBEDDING: True, LOSS: True, VIRTUAL: 2}, "0 12 34 5"),
        (2, {EVEN: 2, EMBEDDING: True, LOSS: True, VIRTUAL: 2}, "- 0 1 -"),
        (7, {EVEN: 2, LAYOUT: "Ett|(tt|)*2,tL"}, "01 23 45 6"),
        (4, {EVEN: 3, LAYOUT: "E|t*4|L"}, "- 0123 -"),
        (3, {EVEN: 2, LAYOUT: [["embedding", "decoder"], ["decoder"], [], ["decoder", "loss"]]}, "0 1 - 2"),
    ],
)
def test_layers_of_all_stages_in_the_order_in_which_they_run(
    num_layers: int, fields: dict[str, Any], layers: str
) -> None:
    config = config_of(num_layers, **fields)
    stages = stages_of(config)
    assert " ".join("".join(map(str, stage.decoder)) or "-" for stage in stages) == layers
    assert [stage.has_final_norm for stage in stages] == [False] * (len(stages) - 1) + [True]
    ranks, virtual = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    for chunk in range(virtual or 1):
        for rank in range(ranks):
            vp_stage = None if virtual is None else chunk
            own = stage_of(config, pp_rank=rank, vp_stage=vp_stage)
            assert own is not None and own.index == chunk * ranks + rank and own == stages[own.index]
            assert get_num_layers_to_build(config, vp_stage, rank) == len(own.decoder)
            assert get_transformer_layer_offset(config, vp_stage, rank) == own.decoder.start


def test_a_layout_says_how_many_virtual_stages_there_are() -> None:
    config = config_of(7, **{EVEN: 2, LAYOUT: "Ett|(tt|)*2,tL"})
    assert config.virtual_pipeline_model_parallel_size == 2
    assert repr(config.pipeline_model_parallel_layout) == "Ett|(tt|)*2,tL"
    assert config_of(4, **{EVEN: 3, LAYOUT: "E|t*4|L"}).virtual_pipeline_model_parallel_size is None


@pytest.mark.parametrize(
    ("num_layers", "fields", "message"),
    [
        (4, {EVEN: 3}, "num_layers must be a multiple of the pipeline stages .*, got 4 layers and 3 stages"),
        (6, {EVEN: 2, EMBEDDING: True}, "got 6 layers with embedding as layers and 2 stages"),
        (8, {EVEN: 3, FIRST: 3}, "must be a multiple of the other pipeline ranks, got 5 of 8 layers for 2 ranks"),
        (8, {EVEN: 2, FIRST: 3, LAST: 4}, "got 1 of 8 layers for 0 ranks"),
        (8, {EVEN: 2, FIRST: 0}, "must be at least 1, got 0 and None"),
        (6, {EVEN: 2, VIRTUAL: 2}, "layers of each pipeline rank must be a multiple of .*, got 3 layers and 2 virtual"),
        (8, {VIRTUAL: 2}, "must go with pipeline_model_parallel_size > 1, got 2 virtual stages and 1 rank"),
        (8, {EVEN: 2, VIRTUAL: 0}, "virtual_pipeline_model_parallel_size must be at least 1, got 0"),
        (8, {EVEN: 4, GROUP: 2}, r"must be at least pipeline_model_parallel_size \(4\), got 2"),
        (8, {EVEN: 2, FIRST: 3, LOSS: True}, "must go without account_for_embedding_in_pipeline_split"),
        (3, {EVEN: 2, FIRST: 2, LAYOUT: "Ett|tL"}, "pipeline_model_parallel_layout must go without"),
        (3, {EVEN: 2, VIRTUAL: 2, LAYOUT: "Ett|tL"}, "must be that of pipeline_model_parallel_layout, 1, got 2"),
        (3, {EVEN: 2, LAYOUT: "Et|t|tL"}, "multiple of pipeline_model_parallel_size stages, got 3 stages"),
        (4, {EVEN: 2, LAYOUT: "Ett|tL"}, r"have num_layers \(4\) transformer layers"),
        (3, {EVEN: 2, LAYOUT: "tEt|tL"}, "begin with its one embedding"),
        (3, {EVEN: 2, LAYOUT: "Ett|tLL"}, "end with its one loss"),
        (3, {EVEN: 2, LAYOUT: "Ett|mtL"}, r"have mtp_num_layers \(0\) layers .*; have its layers m behind all t"),
        (3, {EVEN: 4, LAYOUT: "Et|||ttL"}, r"each rank .* must have a layer, got none on ranks 1 and 2"),
        (3, {EVEN: 3, LAYOUT: "Et||t|t||L"}, r"each rank .* must have a layer, got none on rank 1; "),
        (3, {EVEN: 2, LAYOUT: "Ett|tLx"}, "must be made of E, t, m, L"),
        (3, {EVEN: 2, LAYOUT: [["embedding"], "decoder"]}, "a string or a list of lists"),
        (3, {EVEN: 2, LAYOUT: [["embedding"], ["nothing"]]}, "must be of embedding, loss, .*, got 'nothing'"),
        (3, {EVEN: 2, LAYOUT: [["embedding", "encoder"], ["decoder", "loss"]]}, "have no encoder layers"),
    ],
)
def test_stages_that_cannot_be_filled_are_refused(num_layers: int, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(num_layers, **fields)


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("Et*3|(tt|)*29,m|L", ["Ettt", *["tt"] * 29, "m", "L"]),
        ("E|(t|)*3,m|m||L", ["E", "t", "t", "t", "m", "m", "", "L"]),
        ("E t , t | (t*2|t)*2 L", ["Ett", "tt", "ttt", "tL"]),
        ("E|*2tL", ["E", "", "tL"]),
    ],
)
def test_strings_are_read_as_in_megatron_core(text: str, stages: list[str]) -> None:
    letters = {LayerType.embedding: "E", LayerType.decoder: "t", LayerType.mtp: "m", LayerType.loss: "L"}
    found = PipelineParallelLayerLayout.parse_str_to_list(text)
    assert ["".join(letters[layer] for layer in stage) for stage in found] == stages
    assert PipelineParallelLayerLayout.get_num_stages_from_str(text) == len(stages)


def test_a_layout_answers_for_each_rank_and_virtual_stage() -> None:
    layout = PipelineParallelLayerLayout.from_str("Et|ttt||t|m|L", 3)
    assert layout.virtual_pipeline_model_parallel_size == 2
    decoders = [layout.get_layer_id_list(vp_stage=chunk, pp_rank=rank) for chunk in range(2) for rank in range(3)]
    assert decoders == [[0], [1, 2, 3], [], [4], [], []]
    assert layout.get_num_layers_to_build(LayerType.mtp, 1, 1) == 1
    assert layout.get_layer_offset(LayerType.mtp, 1, 2) == 1
    assert layout.validate_layer_layout(5, 1), "its layers of multi-token prediction are apart from the loss"
    assert layout.pretty_repr().splitlines() == [
        "           VPP rank 0         VPP rank 1",
        "PP rank 0  embedding,decoder  decoder",
        "PP rank 1  decoder*3          mtp",
        "PP rank 2  (empty stage)      loss",
    ]
