"""A layer of gated delta net computes what is written out here, and what it cannot serve is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_linear_attention_pattern,
    get_transformer_block_with_experimental_attention_variant_spec,
    is_gated_delta_net_variant,
    is_linear_attention_variant,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.state_layers import DECAY_RATES
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.attention_patterns import is_linear
from megatron.core.transformer.linear_attention_checks import LINEAR_ATTENTION_CONTRADICTIONS, LINEAR_ATTENTION_SIZES
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.training.telemetry.flops import flops_per_sample

LENGTH, BATCH, KEYS, VALUES, KEY_WIDTH, WIDTH, KERNEL = 11, 2, 2, 6, 4, 5, 3
BASE: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "init_method_std": 0.5,
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 2,
    "linear_conv_kernel_dim": KERNEL,
    "linear_key_head_dim": KEY_WIDTH,
    "linear_value_head_dim": WIDTH,
    "linear_num_key_heads": KEYS,
    "linear_num_value_heads": VALUES,
}


def _config(**fields: Any) -> TransformerConfig:
    return TransformerConfig(**{**BASE, **fields})


def _layer(config: TransformerConfig) -> GatedDeltaNet:
    spec = get_gpt_layer_local_spec(linear_attention=True).submodules.self_attention
    layer: GatedDeltaNet = build_module(spec, config=config, layer_number=1)
    for parameter in layer.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
    return layer


def _written_out(layer: GatedDeltaNet, hidden: torch.Tensor) -> torch.Tensor:
    """One sequence, one value head and one token at a time."""
    config, ratio = layer.config, VALUES // KEYS
    mixed = (hidden @ layer.in_proj.weight.T).unflatten(-1, (KEYS, -1))
    wide = 2 * KEY_WIDTH + ratio * WIDTH
    channels, gates, rest = mixed[..., :wide], mixed[..., wide : wide + ratio * WIDTH], mixed[..., -2 * ratio :]
    kernels, outputs = layer.conv1d.weight[:, 0].unflatten(0, (KEYS, wide)), []
    for row in range(hidden.shape[1]):
        heads = []
        for head in range(VALUES):
            of_key, own = divmod(head, ratio)
            state, tokens = torch.zeros(KEY_WIDTH, WIDTH), []
            for token in range(hidden.shape[0]):
                seen = range(max(0, token - KERNEL + 1), token + 1)
                mix = sum(channels[at, row, of_key] * kernels[of_key, :, KERNEL - 1 - token + at] for at in seen)
                mix = F.silu(torch.as_tensor(mix))
                query, key = F.normalize(mix[:KEY_WIDTH], dim=0), F.normalize(mix[KEY_WIDTH : 2 * KEY_WIDTH], dim=0)
                value = mix[2 * KEY_WIDTH :].unflatten(0, (ratio, WIDTH))[own]
                beta, alpha = rest[token, row, of_key, own].sigmoid(), rest[token, row, of_key, ratio + own]
                state = state * torch.exp(-layer.A_log[head].exp() * F.softplus(alpha + layer.dt_bias[head]))
                state = state + beta * torch.outer(key, value - key @ state)
                context = query @ state / KEY_WIDTH**0.5
                scale = layer.out_norm.weight + config.layernorm_zero_centered_gamma
                if config.normalization == "RMSNorm":
                    normed = context / (context.square().mean() + config.layernorm_epsilon).sqrt() * scale
                else:
                    normed = F.layer_norm(context, (WIDTH,), scale, layer.out_norm.bias, config.layernorm_epsilon)
                tokens.append(normed * F.silu(gates[token, row, of_key].unflatten(0, (ratio, WIDTH))[own]))
            heads.append(torch.stack(tokens))
        outputs.append(torch.cat(heads, dim=-1))
    return torch.stack(outputs, dim=1) @ layer.out_proj.weight.T


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_a_layer_is_what_is_written_out(normalization: str, zero_centered: bool) -> None:
    """Outputs and the gradients of input and all weights, in fp32, whose sums have another order."""
    layer = _layer(_config(normalization=normalization, layernorm_zero_centered_gamma=zero_centered))
    hidden = torch.randn(LENGTH, BATCH, 16, generator=torch.Generator().manual_seed(3), requires_grad=True)
    (found, bias), true = layer(hidden), _written_out(layer, hidden)
    assert bias is None
    torch.testing.assert_close(found, true, atol=1e-5, rtol=1e-4)
    leaves = [hidden, *layer.parameters()]
    weights = torch.randn(true.shape, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad((found * weights).sum(), leaves)
    for grad, own in zip(grads, torch.autograd.grad((true * weights).sum(), leaves), strict=True):
        torch.testing.assert_close(grad, own, atol=1e-4, rtol=1e-3)


def test_recomputation_changes_no_bit() -> None:
    """What is between the projections is computed again in backward: ``core_attn``."""
    plain, again = (
        _layer(_config(**fields))
        for fields in ({}, {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]})
    )
    hidden = torch.randn(LENGTH, BATCH, 16, generator=torch.Generator().manual_seed(3))
    kept: list[int] = []
    for layer in (plain, again):
        saved: list[torch.Tensor] = []

        def keep(x: torch.Tensor, saved: list[torch.Tensor] = saved) -> torch.Tensor:
            saved.append(x)
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            output = layer(hidden)[0]
        output.square().sum().backward()
        kept.append(len(saved))
    assert kept[1] < kept[0] // 2
    for one, other in zip(plain.parameters(), again.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)


def test_initial_values_are_megatron_cores() -> None:
    layer: GatedDeltaNet = build_module(
        get_gpt_layer_local_spec(linear_attention=True).submodules.self_attention, config=_config(), layer_number=1
    )
    rates = layer.A_log.detach().exp()
    assert torch.equal(layer.dt_bias, torch.ones(VALUES)) and len(set(rates.tolist())) == VALUES
    assert DECAY_RATES[0] <= float(rates.min()) and float(rates.max()) <= DECAY_RATES[1]
    assert 0 < float(layer.conv1d.weight.detach().abs().max()) <= KERNEL**-0.5


def test_weights_of_any_dtype_compute_states_in_fp32() -> None:
    """bf16 rounds what goes in and out, not what a state sums up."""
    config = _config(params_dtype=torch.bfloat16, bf16=True)
    layer, wide = _layer(config), _layer(_config())
    wide.load_state_dict({name: value.float() for name, value in layer.state_dict().items()})
    hidden = torch.randn(LENGTH, BATCH, 16, generator=torch.Generator().manual_seed(3)).bfloat16()
    found, true = layer(hidden)[0], wide(hidden.float())[0]
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.float(), true, atol=0.05, rtol=0.05)


@pytest.mark.parametrize(
    ("frequency", "linear"), [(2, [1, 0, 1, 0]), (3, [1, 1, 0, 1]), (1, [0] * 4), ([0, 1, 1, 0], [0, 1, 1, 0])], ids=str
)
def test_the_pattern_says_which_layers_are_linear(frequency: int | list[int], linear: list[int]) -> None:
    config = _config(linear_attention_freq=frequency)
    assert config.experimental_attention_variant == "gdn"
    assert [is_linear(config, number) for number in range(1, 5)] == [bool(one) for one in linear]
    with torch.device("meta"):
        block = TransformerBlock(config, get_gpt_decoder_block_spec(config))
    kinds = [type(layer.self_attention) for layer in block.layers]
    assert kinds == [GatedDeltaNet if one else SelfAttention for one in linear]


def test_other_layers_may_have_latent_attention() -> None:
    config = MLATransformerConfig(**BASE, normalization="LayerNorm", q_lora_rank=None, kv_lora_rank=8)
    block = TransformerBlock(config, get_gpt_decoder_block_spec(config))
    assert [type(layer.self_attention) for layer in block.layers] == [GatedDeltaNet, MLASelfAttention] * 2
    assert block(torch.randn(LENGTH, BATCH, 16), None).shape == (LENGTH, BATCH, 16)


def test_flops_count_projections_convolution_and_states() -> None:
    """Megatron-LM's count, by hand; there is no term that grows with the square of the sequence."""
    keys, values = KEYS * KEY_WIDTH, VALUES * WIDTH
    weights = 16 * (2 * keys + 3 * values + 2 * VALUES) + KERNEL * (2 * keys + values) + 4 * KEY_WIDTH * values
    sizes: dict[str, Any] = {"seq_length": 32, "vocab_size": 64}
    both = flops_per_sample(_config(num_layers=2, linear_attention_freq=[1, 0]), **sizes)
    none = flops_per_sample(_config(num_layers=1, linear_attention_freq=[0]), **sizes)
    assert both - none == 6 * 32 * (weights + 3 * 16 * 64)  # and the MLP of the layer


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"experimental_attention_variant": None, "linear_attention_freq": 2},
        "linear_attention_freq must be None without experimental_attention_variant, got 2",
    ),
    *(({name: 0}, f"{name} must be at least 1, got 0") for name in LINEAR_ATTENTION_SIZES),
    ({"linear_attention_freq": None}, r"linear_attention_freq must be positive, or hold 1 .* got None"),
    ({"linear_num_value_heads": 5}, "linear_num_value_heads must be a multiple of linear_num_key_heads, got 5 and 2"),
    (
        {"tensor_model_parallel_size": 4},
        "linear_num_key_heads must be a multiple of tensor_model_parallel_size, got 2 and 4",
    ),
    ({"context_parallel_size": 2}, "context_parallel_size must be 1 with experimental_attention_variant, got 2"),
    ({"activation_func": F.gelu}, "activation_func must be SiLU with experimental_attention_variant, got 'gelu'"),
    (
        {"fp8": "hybrid", "bf16": True, "params_dtype": torch.bfloat16},
        "fp8 must go with linear attention whose projection has a multiple of 16 rows",
    ),
]


def test_each_row_of_the_table_has_a_case() -> None:
    assert len(REFUSED) == len(LINEAR_ATTENTION_CONTRADICTIONS)


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=lambda value: str(value)[:60].split(" at ")[0])
def test_what_contradicts_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**{**BASE, **fields})


@pytest.mark.parametrize("variant", ["dsa", "gdn2"])
def test_other_variants_are_refused(variant: str) -> None:
    with pytest.raises(NotImplementedError, match=f"experimental_attention_variant must be .*{variant}"):
        _config(experimental_attention_variant=variant)


def test_masks_and_packs_are_refused() -> None:
    layer, hidden = _layer(_config()), torch.randn(LENGTH, 1, 16)
    with pytest.raises(NotImplementedError, match="attention_mask must be None with gated delta net"):
        layer(hidden, torch.zeros(LENGTH, LENGTH, dtype=torch.bool))
    pack = PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor([0, 4, LENGTH]))
    with pytest.raises(NotImplementedError, match="packed_seq_params must be None with gated delta net"):
        layer(hidden, None, packed_seq_params=pack)


def test_megatron_cores_functions_of_variants_say_the_same() -> None:
    config = _config()
    assert get_linear_attention_pattern(config) == [1, 0, 1, 0]
    layers = get_transformer_block_with_experimental_attention_variant_spec(config).layer_specs or []
    assert [spec.submodules.self_attention.module for spec in layers] == [GatedDeltaNet, SelfAttention] * 2
    for variant, expected in (("gdn", True), ("gated_delta_net", True), ("dsa", False), (None, False)):
        assert is_gated_delta_net_variant(variant) == is_linear_attention_variant(variant) == expected
