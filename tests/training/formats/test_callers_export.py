"""Code of Megatron-Core's callers that reads and writes weights by their names on a rank: it adds the offsets of stage and expert itself."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_group_builder import build_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection, group_rank, group_size
from megatron.core.rank_grid import RankGrid
from megatron.core.tensor_parallel.partition import partition
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.training.formats.recognise import find_foreign
from tests.support.huggingface_models import FOLDER, stored_tensors
from tests.support.launch import run_ranks

DEGREES = {
    2: ({"tp": 2}, {"pp": 2}, {"ep": 2}),
    4: ({"tp": 2, "pp": 2}, {"pp": 2, "ep": 2}, {"tp": 2, "ep": 2}),
}
_FIELDS = {"tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "ep": "expert_model_parallel_size"}
_NAMES = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.router.weight": "block_sparse_moe.gate.weight",
}


def _build(degrees: dict[str, int]) -> tuple[GPTModel, ProcessGroupCollection, dict[str, torch.Tensor]]:
    """This rank's part of the folder's model with other values, and the whole model's weights under our names."""
    found = find_foreign(FOLDER / "mixtral")
    assert found is not None
    parallel: dict[str, Any] = {_FIELDS[kind]: size for kind, size in degrees.items()}
    groups = build_process_groups(RankGrid(world_size=dist.get_world_size(), **parallel))
    settings = found.architecture
    known = TransformerConfig.__dataclass_fields__
    config = TransformerConfig(
        **{k: v for k, v in settings.items() if k in known}, **parallel, sequence_parallel="tp" in degrees
    )
    model = GPTModel(
        config,
        get_gpt_decoder_block_spec(config),
        settings["padded_vocab_size"],
        settings["max_position_embeddings"],
        pre_process=group_rank(groups.pp) == 0,
        post_process=group_rank(groups.pp) == group_size(groups.pp) - 1,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        pg_collection=groups,
    )
    reader = found.reader(settings)
    return model, groups, {name: reader.tensor(name) for name in reader.entries if "_extra_state" not in name}


def _name_in_whole_model(name: str, config: TransformerConfig, groups: ProcessGroupCollection) -> str:
    """What callers do, since names are those of Megatron-Core: add the numbers of layers and experts on earlier ranks."""
    offset = get_transformer_layer_offset(config, pp_rank=group_rank(groups.pp))
    experts = config.num_moe_experts // group_size(groups.ep) * group_rank(groups.ep)  # type: ignore[operator]
    name = re.sub(r"(?<=decoder\.layers\.)\d+", lambda found: str(int(found[0]) + offset), name)
    return re.sub(r"(?<=local_experts\.)\d+", lambda found: str(int(found[0]) + experts), name)


def _group_of(parameter: Any, groups: ProcessGroupCollection) -> ProcessGroup | None:
    return groups.tp if getattr(parameter, "allreduce", True) else groups.expt_tp


def _load_own_parts(model: nn.Module, groups: ProcessGroupCollection, whole: dict[str, torch.Tensor]) -> None:
    own = {}
    for name, parameter in model.named_parameters():
        full, group = whole[_name_in_whole_model(name, model.config, groups)], _group_of(parameter, groups)  # type: ignore[arg-type]
        if getattr(parameter, "tensor_model_parallel", False):
            dim, stride = parameter.partition_dim, parameter.partition_stride  # type: ignore[attr-defined]
            full = partition(full, dim, stride, group_rank(group), group_size(group))
        own[name] = full.clone()
    model.load_state_dict(own, strict=True)


def _gathered(parameter: Any, groups: ProcessGroupCollection) -> torch.Tensor:
    """The whole tensor, from the parts of tensor-parallel ranks."""
    group = _group_of(parameter, groups)
    if not getattr(parameter, "tensor_model_parallel", False) or group_size(group) == 1:
        return parameter.data.clone()
    parts = [torch.empty_like(parameter.data) for _ in range(group_size(group))]
    dist.all_gather(parts, parameter.data, group=group)
    if parameter.partition_stride == 2:  # gates and values, each split
        halves = [part.chunk(2, dim=parameter.partition_dim) for part in parts]
        return torch.cat([half[i] for i in (0, 1) for half in halves], dim=parameter.partition_dim)
    return torch.cat(parts, dim=parameter.partition_dim)


def _in_huggingface(name: str, tensor: torch.Tensor, config: TransformerConfig) -> dict[str, torch.Tensor]:
    found = re.fullmatch(r"(?:decoder\.layers\.(\d+)\.)?(.+)", name)
    assert found is not None
    layer, rest = found.groups()
    there = f"model.layers.{layer}." if layer is not None else ""
    if rest in _NAMES:
        return {there + _NAMES[rest]: tensor}
    if expert := re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc([12])\.weight", rest):
        there += f"block_sparse_moe.experts.{expert[1]}."
        parts = dict(zip(("w1", "w3"), tensor.chunk(2), strict=True)) if expert[2] == "1" else {"w2": tensor}
        return {f"{there}{kind}.weight": part for kind, part in parts.items()}
    assert rest == "self_attention.linear_qkv.weight", name
    heads, groups = config.num_attention_heads, config.num_query_groups
    assert groups is not None and config.kv_channels is not None
    by_group = tensor.view(groups, heads // groups + 2, config.kv_channels, config.hidden_size)
    pieces = by_group.split((heads // groups, 1, 1), dim=1)
    return {
        f"{there}self_attn.{kind}_proj.weight": piece.reshape(-1, config.hidden_size)
        for kind, piece in zip("qkv", pieces, strict=True)
    }


def exports_are_the_folder(world_size: int) -> None:
    for degrees in DEGREES[world_size]:
        model, groups, whole = _build(degrees)
        config, layers, experts = model.config, model.decoder.layers, 4 // degrees.get("ep", 1)
        assert [name for name, _ in layers.named_children()] == [str(i) for i in range(2 // degrees.get("pp", 1))]
        offset = get_transformer_layer_offset(config, pp_rank=group_rank(groups.pp))
        assert [layer.layer_number for layer in layers] == [offset + i + 1 for i in range(len(layers))]
        assert [n for n, _ in layers[0].mlp.experts.local_experts.named_children()] == list(map(str, range(experts)))
        assert {n for n, _ in model.named_parameters()} == set(model.state_dict())
        _load_own_parts(model, groups, whole)
        own: dict[str, torch.Tensor] = {}
        for name, parameter in model.named_parameters():
            own |= _in_huggingface(_name_in_whole_model(name, config, groups), _gathered(parameter, groups), config)
        found: list[dict[str, torch.Tensor]] = [{}] * world_size
        dist.all_gather_object(found, own)
        exported = {name: tensor for of_rank in found for name, tensor in of_rank.items()}
        expected = stored_tensors(FOLDER / "mixtral")
        assert exported.keys() == expected.keys(), degrees
        for name, tensor in expected.items():
            assert torch.equal(exported[name], tensor), f"{degrees}: {name}"


@pytest.mark.parametrize("world_size", [2, 4])
def test_what_callers_load_and_export_is_the_folder_of_hugging_face(world_size: int) -> None:
    """Names with the offset in them would count it twice, and write weights under other layers' names without an error."""
    run_ranks(world_size, exports_are_the_folder, world_size)
