"""Layers that callers derive from ours, with Megatron-Core's arguments in its order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

SPEC = get_gpt_layer_local_spec()
CAUSAL = AttnMaskType.causal


class _Attention(SelfAttention):
    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = CAUSAL,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        pp_layer_offset: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            config, submodules, layer_number, attn_mask_type, cp_comm_type, pg_collection, pp_layer_offset, name
        )


class _MLP(MLP):
    def __init__(self, config: TransformerConfig, submodules: MLPSubmodules, **kwargs: Any) -> None:
        groups = kwargs.pop("pg_collection", None)
        super().__init__(config, submodules, False, None, None, None, "mlp", groups)


class _Layer(TransformerLayer):
    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        layer_number: int = 1,
        hidden_dropout: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, submodules, layer_number, hidden_dropout, pg_collection, vp_stage, **kwargs)


def _config(**fields: Any) -> TransformerConfig:
    return TransformerConfig(
        **{"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "use_cpu_initialization": True, **fields}
    )


def _spec(layer: type, attention: type, mlp: type) -> ModuleSpec:
    parts = SPEC.submodules
    submodules = TransformerLayerSubmodules(**vars(parts))
    submodules.self_attention = ModuleSpec(
        module=attention, params=parts.self_attention.params, submodules=parts.self_attention.submodules
    )
    submodules.mlp = ModuleSpec(module=mlp, submodules=parts.mlp.submodules)
    return ModuleSpec(module=layer, submodules=submodules)


def test_layers_of_a_caller_compute_what_ours_do() -> None:
    config, x = _config(), torch.randn(5, 2, 16)
    ours = TransformerBlock(config, SPEC, True, True, True, None, None)
    theirs = TransformerBlock(config, _spec(_Layer, _Attention, _MLP))
    assert {type(m) for m in theirs.modules()} >= {_Layer, _Attention, _MLP}
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(theirs.eval()(x, None), ours.eval()(x, None))


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"pp_layer_offset": 2}, "pp_layer_offset"),
    ],
)
def test_what_is_not_served_is_refused_by_name(arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"TransformerLayer.{name}"):
        TransformerLayer(_config(), SPEC.submodules, **arguments)


def test_names_and_numbers_of_the_whole_model_change_nothing() -> None:
    layer = TransformerLayer(
        _config(), SPEC.submodules, 2, vp_stage=1, add_layer_offset=False, pp_layer_offset=0, name="decoder.1"
    )
    assert layer.layer_number == 2


def test_another_exchange_than_the_configurations_is_refused() -> None:
    DotProductAttention(_config(), 1, CAUSAL, "self", None, None, None, None)
    DotProductAttention(_config(cp_comm_type="a2a"), 1, CAUSAL, "self", None, None, "a2a")
    with pytest.raises(ValueError, match="cp_comm_type"):
        DotProductAttention(_config(cp_comm_type="a2a"), 1, CAUSAL, "self", cp_comm_type="all_gather")


def test_further_arguments_of_embeddings_routers_and_optimizers() -> None:
    config = _config()
    embedding = LanguageModelEmbedding(config, 8, 4, "learned_absolute", 0, True, None, ProcessGroupCollection())
    assert embedding.scatters is False and embedding.tp_group is None
    with pytest.raises(NotImplementedError, match="num_tokentypes"):
        LanguageModelEmbedding(config, 8, 4, num_tokentypes=2)
    assert RotaryEmbedding(8, 1.0, False, None, 10000, False, 8.0, True, None).cp_group is None
    assert TopKRouter(_config(num_moe_experts=2), is_mtp_layer=True).weight.shape == (2, config.hidden_size)
    settings = OptimizerConfig(optimizer="adam", lr=0.1)
    get_megatron_optimizer(settings, [embedding], use_gloo_process_groups=False, pg_collection=None)
    with pytest.raises(NotImplementedError, match="dump_param_to_param_group_map"):
        get_megatron_optimizer(settings, [embedding], dump_param_to_param_group_map="map.json")  # type: ignore[arg-type]
