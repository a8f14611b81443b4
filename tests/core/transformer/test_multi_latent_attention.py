"""Multi-latent attention equals a plain reference, and what its configuration refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, WholeLinear
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from tests.support.reference_mla import reference_mla
from tests.support.tiny_gpt import random_tokens

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 5,
    "qk_layernorm": True,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "init_method_std": 0.15,
    "rotary_base": 100.0,
    # The bounds of YaRN's blend are channels 0 and 3 of 4.
    "original_max_position_embeddings": 64,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "rotary_scaling_factor": 4.0,
}
FP8: dict[str, Any] = {
    "fp8": "hybrid",
    "bf16": True,
    "params_dtype": torch.bfloat16,
    "hidden_size": 32,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 16,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "yarn": {},
    "yarn with both factors": {"mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn without longer contexts": {"rotary_scaling_factor": 1.0, "mscale_all_dim": 1.0},
    "rope": {"rope_type": "rope"},
    "rope with a scale of scores": {"rope_type": "rope", "mscale_all_dim": 1.0},
    "queries without a latent vector": {"q_lora_rank": None},
    "no norms": {"qk_layernorm": False},
    "neither norms nor latent queries": {"q_lora_rank": None, "qk_layernorm": False},
    "fused": {"apply_rope_fusion": True, "mscale": 0.7, "mscale_all_dim": 1.3, "persist_layer_norm": True},
    "all scores in memory": {"attention_backend": "unfused"},
    "all scores in memory, scaled by layer": {"apply_query_key_layer_scaling": True},
    "a window": {"window_size": (3, 0)},
    "a window, all scores in memory": {"window_size": (3, 0), "attention_backend": "unfused"},
    "values as wide as keys": {"v_head_dim": 14},
    "values wider than keys": {"v_head_dim": 16},
    "up-projections again": {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]},
    "heads of one width again": {
        "v_head_dim": 14,
        "recompute_granularity": "selective",
        "recompute_modules": ["mla_up_proj"],
    },
    "all of it again": {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj", "core_attn"]},
    "fused, up-projections again": {
        "apply_rope_fusion": True,
        "recompute_granularity": "selective",
        "recompute_modules": ["mla_up_proj"],
    },
}


def _config(**fields: Any) -> MLATransformerConfig:
    return MLATransformerConfig(**{**SIZES, **fields})


def _attention(config: MLATransformerConfig) -> MLASelfAttention:
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, multi_latent_attention=True)
    attention: MLASelfAttention = build_module(spec.submodules.self_attention, config=config, layer_number=2)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in attention.parameters():  # norms' weights are not all one
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    return attention


@pytest.mark.parametrize("option", OPTIONS)
def test_outputs_and_gradients_equal_the_reference(option: str) -> None:
    """fp32, so the two differ by the order of sums alone."""
    config = _config(**OPTIONS[option])
    attention = _attention(config)
    x, grad = torch.randn(2, 9, 2, 24, generator=torch.Generator().manual_seed(2)).unbind(0)
    weights = {name: value.detach().clone().requires_grad_() for name, value in attention.named_parameters()}
    own_input, reference_input = (x.clone().requires_grad_() for _ in range(2))
    output, bias = attention(own_input, None)
    expected = reference_mla(weights, config, reference_input)
    assert bias is None
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    output.backward(grad)
    expected.backward(grad)
    torch.testing.assert_close(own_input.grad, reference_input.grad, rtol=1e-4, atol=1e-5)
    for name, parameter in attention.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-4, atol=1e-5, msg=name)


def _model(config: TransformerConfig, **arguments: Any) -> GPTModel:
    return GPTModel(config, get_gpt_decoder_block_spec(config), 40, 16, **arguments)


def test_a_model_turns_heads_by_its_configuration_whatever_else_positions_are() -> None:
    """As Megatron-Core's model: rotary positions belong to this attention, and learned ones are added to them."""
    config = _config()
    tokens, positions, _ = random_tokens()
    for kind in ("rope", "learned_absolute", "none"):
        model = _model(config, position_embedding_type=kind, rotary_base=7)
        names = {name for name, _ in model.named_parameters()}
        assert ("embedding.position_embeddings.weight" in names) == (kind == "learned_absolute")
        logits = model(tokens, positions, None)
        for layer in model.decoder.layers:
            assert model.rotary_pos_emb is not None
            tables = model.rotary_pos_emb.get_cos_sin(9, torch.device("cpu"))
            attention: Any = layer.self_attention
            torch.testing.assert_close(attention._tables(torch.empty(9, 2, 24)), tables)
        model.rotary_pos_emb = None
        torch.testing.assert_close(model(tokens, positions, None), logits)


def test_samples_of_a_pack_do_not_see_each_other() -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    attention, (x,) = _attention(_config()), torch.randn(1, 9, 1, 24, generator=torch.Generator().manual_seed(3))
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts)
    alone = torch.cat([attention(part, None)[0] for part in x.split((4, 5))])
    torch.testing.assert_close(attention(x, None, packed_seq_params=packed)[0], alone)


def test_heads_are_released_until_backward() -> None:
    """Their memory is what recomputation is for."""
    config = _config(recompute_granularity="selective", recompute_modules=["mla_up_proj"])
    attention, kept = _attention(config), list[torch.Tensor]()
    attend = attention.attend

    def watched(*args: Any) -> torch.Tensor:
        kept.extend(args[:3])
        return attend(*args)

    attention.attend = watched  # type: ignore[method-assign,assignment]
    output, _ = attention(torch.randn(9, 2, 24, requires_grad=True), None)
    assert [x.untyped_storage().nbytes() for x in kept] == [0, 0, 0]
    output.sum().backward()
    assert all(x.untyped_storage().nbytes() for x in kept)
    kept.clear()
    # Copies to the host read them while compute goes on.
    offloading = {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]}
    offloaded = _attention(_config(recompute_granularity="selective", recompute_modules=["mla_up_proj"], **offloading))
    attend = offloaded.attend
    offloaded.attend = watched  # type: ignore[method-assign,assignment]
    offloaded(torch.randn(9, 2, 24, requires_grad=True), None)
    assert len(kept) == 3 and all(x.untyped_storage().nbytes() for x in kept)
    kept.clear()
    attention.eval()(torch.randn(9, 2, 24), None)
    assert all(x.untyped_storage().nbytes() for x in kept)


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"kv_lora_rank": 0}, "kv_lora_rank must be at least 1, got 0"),
    ({"q_lora_rank": 0}, "q_lora_rank must be at least 1, got 0"),
    ({"qk_head_dim": 0}, "qk_head_dim must be at least 1"),
    ({"v_head_dim": -1}, "v_head_dim must be at least 1"),
    ({"qk_pos_emb_head_dim": 0}, "qk_pos_emb_head_dim must be at least 1"),
    ({"rotary_base": 0}, "rotary_base must be at least 1, got 0"),
    ({"qk_pos_emb_head_dim": 7}, "qk_pos_emb_head_dim must be even, since its channels turn in pairs, got 7"),
    ({"rope_type": "alibi"}, "rope_type must be 'rope' or 'yarn', got 'alibi'"),
    ({"rotary_percent": 0.5}, "rotary_percent must be 1 with rope_type='yarn', got 0.5"),
    ({"rotary_scaling_factor": 0.0}, "rotary_scaling_factor and original_max_position_embeddings must be positive"),
    ({"beta_fast": 1.0, "beta_slow": 2.0}, "beta_slow must be positive and at most beta_fast, got 2.0 and 1.0"),
    ({"rotary_interleaved": True}, "rotary_interleaved must be False with multi_latent_attention"),
    ({"num_query_groups": 2}, "num_query_groups must be None with multi_latent_attention, got 2"),
    ({"add_qkv_bias": True}, "add_qkv_bias must be False with multi_latent_attention"),
    ({"attention_output_gate": True}, "attention_output_gate, qk_l2_norm and no_rope_freq must be off"),
    ({"qk_l2_norm": True, "qk_layernorm": False}, "attention_output_gate, qk_l2_norm and no_rope_freq must be off"),
    ({"no_rope_freq": 2}, "attention_output_gate, qk_l2_norm and no_rope_freq must be off"),
    ({"softmax_scale": 0.5}, "softmax_scale must be None with multi_latent_attention, got 0.5"),
    (
        {**FP8, "kv_lora_rank": 40, "qk_pos_emb_head_dim": 8},
        "latent vectors of a multiple of 16, got q_lora_rank 16, kv_lora_rank 40 and qk_pos_emb_head_dim 8",
    ),
    ({**FP8, "v_head_dim": 2}, "a rank's heads of a multiple of 16, got num_attention_heads 4 of qk_head_dim 16"),
    (
        {"window_size": (3, 0), "window_rotary_base": 50.0},
        "window_rotary_base must be None with multi_latent_attention",
    ),
    ({"use_mup": True}, "use_mup must be False with multi_latent_attention, got True"),
]


@pytest.mark.parametrize(("fields", "message"), CONTRADICTIONS)
def test_each_contradiction_is_an_error_with_a_remedy(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        _config(**fields)


def test_what_is_not_served_is_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match=r"MLATransformerConfig.cache_mla_latents must be False"):
        _config(cache_mla_latents=True)
    with pytest.raises(NotImplementedError, match=r"MLATransformerConfig.multi_latent_attention must be True"):
        _config(multi_latent_attention=False)
    with pytest.raises(NotImplementedError, match=r"its settings are those of MLATransformerConfig; use that class"):
        TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, multi_latent_attention=True)
    with pytest.raises(NotImplementedError, match=r"rope_scaling=True.* is not served with multi-latent attention"):
        _model(_config(), rope_scaling=True)
    with pytest.raises(NotImplementedError, match=r"qk_l2_norm=...\) is not served"):
        get_gpt_layer_local_spec(multi_latent_attention=True, qk_l2_norm=True)
    with pytest.raises(ValueError, match=r"rotary_pos_emb must be None"):
        _attention(_config())(torch.randn(9, 2, 24), None, torch.randn(9, 1, 1, 8))


def test_spec_and_configuration_must_agree() -> None:
    """Otherwise a model would silently have another attention, or no norms."""
    plain = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
    local = get_gpt_layer_local_spec
    cases: list[tuple[TransformerConfig, Any, str]] = [
        (_config(), local(), "must come with a layer spec of multi-latent attention, got one with SelfAttention"),
        (_config(), local(multi_latent_attention=True), "must agree on qk_layernorm, got q_layernorm"),
        (plain, local(multi_latent_attention=True), "needs an MLATransformerConfig, got TransformerConfig"),
    ]
    for config, spec, message in cases:
        with pytest.raises((TypeError, ValueError), match=message):
            build_module(spec.submodules.self_attention, config=config, layer_number=1)
    spec = local(multi_latent_attention=True, qk_layernorm=True)
    spec.submodules.self_attention.submodules = MLASelfAttentionSubmodules(linear_proj=torch.nn.Linear)
    with pytest.raises(ValueError, match=r"MLASelfAttentionSubmodules.core_attention must be given"):
        build_module(spec.submodules.self_attention, config=_config(), layer_number=1)


def test_a_column_parallel_layer_in_the_spec_of_a_down_projection_is_whole() -> None:
    """As in Megatron-Core's spec; split over ranks, its norm would be counted in parts."""
    spec = get_gpt_layer_local_spec(multi_latent_attention=True, qk_layernorm=True)
    spec.submodules.self_attention.submodules.linear_q_down_proj = ColumnParallelLinear
    attention = build_module(spec.submodules.self_attention, config=_config(), layer_number=1)
    assert type(attention.linear_q_down_proj) is WholeLinear
    assert not hasattr(attention.linear_q_down_proj.weight, "tensor_model_parallel")

    class OtherColumns(ColumnParallelLinear):
        pass

    spec.submodules.self_attention.submodules.linear_q_down_proj = OtherColumns
    with pytest.raises(ValueError, match="linear_q_down_proj must be whole on each tensor-parallel rank, got OtherCol"):
        build_module(spec.submodules.self_attention, config=_config(), layer_number=1)
    with pytest.raises(ValueError, match="WholeLinear must have bias=False"):
        WholeLinear(2, 2, bias=True, config=_config(), init_method=torch.nn.init.zeros_)


@pytest.mark.parametrize(
    ("mscale", "factor"),
    [((1.0, 0.0), 0.1 * math.log(40) + 1), ((1.0, 1.0), 1.0), ((None, None), 0.1 * math.log(40) + 1)],
)
def test_yarn_returns_angles_and_the_factor_of_cosines_and_sines(
    mscale: tuple[float | None, float | None], factor: float
) -> None:
    """As Megatron-Core's; ``get_cos_sin`` has it in cosines and sines already."""
    yarn = YarnRotaryEmbedding(8, scaling_factor=40.0, mscale=mscale[0], mscale_all_dim=mscale[1])
    angles, found = yarn(6)
    assert found == pytest.approx(factor)
    cosines, _ = yarn.get_cos_sin(6, torch.device("cpu"))
    torch.testing.assert_close(cosines, angles.view(6, 8)[:, :4].cos() * factor)
