"""Windows, sinks, gates, norms of queries and keys and layers without rotary positions equal what is written out here."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.attention_checks import ATTENTION_CONTRADICTIONS
from megatron.core.transformer.attention_patterns import rotates, window_of_layer
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

LENGTH, BATCH, HEADS, GROUPS, WIDTH = 7, 2, 4, 2, 8
BASE: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": HEADS * WIDTH,
    "num_attention_heads": HEADS,
    "num_query_groups": GROUPS,
    "attention_dropout": 0.0,
    "init_method_std": 1.0,
}


def _config(**fields: Any) -> TransformerConfig:
    return TransformerConfig(**{**BASE, **fields})


def _written_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    window: int | None,
    sinks: torch.Tensor | None,
    samples: list[int],
) -> torch.Tensor:
    """Attention [s, b, n, d] one query at a time: it sees its own position and ``window`` before it, of its own sample."""
    rows = []
    for position in range(query.shape[0]):
        seen = [
            other
            for other in range(position + 1)
            if samples[other] == samples[position] and (window is None or position - other <= window)
        ]
        keys = key[seen].repeat_interleave(HEADS // GROUPS, dim=2)
        values = value[seen].repeat_interleave(HEADS // GROUPS, dim=2)
        exponentials = ((query[position] * keys).sum(-1) / math.sqrt(WIDTH)).exp()  # [seen, b, n]
        total = exponentials.sum(0) + (0 if sinks is None else sinks.exp())
        rows.append(((exponentials / total).unsqueeze(-1) * values).sum(0))
    return torch.stack(rows).flatten(2)


VARIANTS: list[dict[str, Any]] = [
    {"window_size": (2, 0)},
    {"window_size": (0, 0)},
    {"window_size": [-1, -1], "softmax_type": "off-by-one"},
    {"softmax_type": "learnable"},
    {"window_size": (3, -1), "softmax_type": "learnable"},
    {"window_size": (20, 0), "softmax_type": "off-by-one"},
]


@pytest.mark.parametrize("backend", ["auto", "unfused"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("fields", VARIANTS, ids=str)
def test_windows_and_sinks_are_those_written_out(fields: dict[str, Any], packed: bool, backend: str) -> None:
    """Context and all gradients, in fp32, whose sums have another order."""
    attention = DotProductAttention(_config(**fields, attention_backend=backend), layer_number=1)
    samples = [0, 0, 0, 1, 1, 1, 1] if packed else [0] * LENGTH
    batch = 1 if packed else BATCH
    generator = torch.Generator().manual_seed(1)
    heads = [
        torch.randn(LENGTH, batch, n, WIDTH, generator=generator).requires_grad_() for n in (HEADS, GROUPS, GROUPS)
    ]
    sinks = {"vanilla": None, "off-by-one": torch.zeros(HEADS)}.get(attention.config.softmax_type)
    learned = [attention.softmax_offset] if attention.config.softmax_type == "learnable" else []
    starts = torch.tensor([0, 3, LENGTH])
    pack = PackedSeqParams(qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=4)
    context = attention(*heads, None, packed_seq_params=pack if packed else None)
    window = (fields.get("window_size") or [-1])[0]
    expected = _written_out(
        *heads,
        window=None if window < 0 else window,
        sinks=learned[0] if learned else sinks,
        samples=samples,
    )
    torch.testing.assert_close(context, expected, rtol=1e-5, atol=1e-5)
    weight = torch.randn(context.shape, generator=generator)
    ours = torch.autograd.grad((context * weight).sum(), [*heads, *learned])
    theirs = torch.autograd.grad((expected * weight).sum(), [*heads, *learned])
    for got, true in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, true, rtol=1e-4, atol=1e-5)


def test_a_mask_hides_keys_of_the_window_too() -> None:
    """As transformer-engine; Megatron-Core's own attention would leave the mask out where a layer has a window."""
    attention = DotProductAttention(_config(window_size=(2, 0)), layer_number=1)
    heads = [torch.randn(LENGTH, 1, n, WIDTH) for n in (HEADS, GROUPS, GROUPS)]
    samples = [0, 0, 0, 1, 1, 1, 1]
    document = torch.tensor(samples)
    mask = (document[:, None] != document[None, :]) | torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    expected = _written_out(*heads, window=2, sinks=None, samples=samples)
    torch.testing.assert_close(attention(*heads, mask), expected, rtol=1e-5, atol=1e-5)


def test_dropout_drops_within_the_window_and_leaves_sinks_alone() -> None:
    attention = DotProductAttention(_config(window_size=(2, 0), softmax_type="off-by-one", attention_dropout=0.5), 1)
    query, key, value = (torch.randn(LENGTH, BATCH, n, WIDTH).requires_grad_() for n in (HEADS, GROUPS, GROUPS))
    (gradient,) = torch.autograd.grad(attention(query, key, value, None)[5].sum(), value)
    assert torch.equal(gradient[:3], torch.zeros_like(gradient[:3])) and gradient[3:6].abs().sum() > 0
    plain = _written_out(query, key, value, window=2, sinks=torch.zeros(HEADS), samples=[0] * LENGTH)
    mean = torch.stack([attention(query, key, value, None) for _ in range(400)]).mean(0)
    assert (mean - plain).abs().mean() < 0.1 * plain.abs().mean()


def test_patterns_are_those_of_megatron_core() -> None:
    """Every n-th layer, counted from 1, is the one without; in lists 1 is a window, and no rotary positions."""

    def windows(**fields: Any) -> list[int | None]:
        return [window_of_layer(_config(**fields), number) for number in range(1, 5)]

    assert windows(window_size=(8, 0)) == [8] * 4
    assert windows(window_size=(8, 0), window_attn_skip_freq=2) == [8, None, 8, None]
    assert windows(window_size=(8, 0), window_attn_skip_freq=1) == [None] * 4
    assert windows(window_size=(8, 0), window_attn_skip_freq=[1, 0, 0, 1]) == [8, None, None, 8]
    assert windows(window_size=(-1, 0)) == windows() == [None] * 4
    for given in (2, [0, 1, 0, 1]):
        assert [rotates(_config(no_rope_freq=given), number) for number in range(1, 5)] == [True, False, True, False]
    assert all(rotates(_config(), number) for number in range(1, 5))


@pytest.mark.parametrize(("number", "fusion"), [(1, False), (2, False), (1, True)])
def test_gates_norms_and_layers_without_rotary_positions(number: int, fusion: bool) -> None:
    """The projection of Megatron-Core: queries of a group, their gates, its key, its value. Layer 2 does not rotate."""
    config = _config(
        attention_output_gate=True,
        qk_l2_norm=True,
        no_rope_freq=[0, 1, 0, 1],
        apply_rope_fusion=fusion,
        add_bias_linear=False,
        layernorm_epsilon=1e-3,
    )
    spec = get_gpt_layer_local_spec(qk_l2_norm=True).submodules.self_attention
    attention = build_module(spec, config=config, layer_number=number)
    assert isinstance(attention, SelfAttention)
    hidden_states = torch.randn(LENGTH, BATCH, HEADS * WIDTH).requires_grad_()
    cos, sin = RotaryEmbedding(WIDTH, 1.0).get_cos_sin(LENGTH, torch.device("cpu"))
    output, _ = attention(hidden_states, None, rotary_pos_cos=cos, rotary_pos_sin=sin)

    mixed = hidden_states @ attention.linear_qkv.weight.T
    of_groups = mixed.unflatten(-1, (GROUPS, 2 * HEADS // GROUPS + 2, WIDTH))
    query, gate, key, value = of_groups.split([HEADS // GROUPS, HEADS // GROUPS, 1, 1], dim=3)
    query, gate, key, value = query.flatten(2, 3), gate.flatten(2), key.flatten(2, 3), value.flatten(2, 3)

    def prepared(x: torch.Tensor) -> torch.Tensor:
        x = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()
        if number == 2:
            return x
        first, second = x.chunk(2, dim=-1)
        c, s = cos[:, None, None], sin[:, None, None]
        return torch.cat((first * c - second * s, second * c + first * s), dim=-1)

    context = _written_out(prepared(query), prepared(key), value, window=None, sinks=None, samples=[0] * LENGTH)
    expected = (context * gate.sigmoid()) @ attention.linear_proj.weight.T
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-3)
    wanted = [hidden_states, attention.linear_qkv.weight]
    ours = torch.autograd.grad(output.square().mean(), wanted)
    theirs = torch.autograd.grad(expected.square().mean(), wanted)
    for got, true in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, true, rtol=1e-3, atol=1e-3 * float(true.abs().max()))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"window_size": (2, 1)}, "window_size must be two numbers, .* since attention is causal, got (2, 1)"),
    ({"softmax_scale": 0.0}, "softmax_scale must be above 0, got 0.0"),
    ({"window_attn_skip_freq": 2}, "window_attn_skip_freq must go with window_size, got None"),
    (
        {"window_size": (2, 0), "window_attn_skip_freq": [1, 0]},
        "window_attn_skip_freq must be positive, or hold 1 (window) or 0 (none) for each of num_layers (4), got [1, 0]",
    ),
    ({"window_rotary_base": 100.0}, "window_rotary_base must go with window_size, got 100.0 and None"),
    ({"no_rope_freq": 0}, "no_rope_freq must be positive, or hold 1 (no rotary positions) or 0 .*, got 0"),
    ({"no_rope_freq": 3}, "num_layers must be a multiple of no_rope_freq, got 4 and 3"),
    ({"softmax_type": "sink"}, "softmax_type must be 'vanilla', 'off-by-one' or 'learnable', got 'sink'"),
    (
        {
            "softmax_type": "learnable",
            "fp8": "hybrid",
            "fp8_dot_product_attention": True,
            "bf16": True,
            "params_dtype": torch.bfloat16,
        },
        "softmax_type must be 'vanilla' with fp8_dot_product_attention, got 'learnable'",
    ),
    ({"qk_l2_norm": True, "qk_layernorm": True}, "qk_l2_norm must be off with qk_layernorm, got both"),
    ({"embedding_init_method_std": -1.0}, "embedding_init_method_std must not be negative, got -1.0"),
    (
        {"glu_linear_offset": 1.0},
        "glu_linear_offset and .* must go with gated_linear_unit, got 1.0 and None without it",
    ),
    (
        {"gated_linear_unit": True, "activation_func_clamp_value": -7.0},
        "activation_func_clamp_value must be positive and finite, got -7.0",
    ),
]


@pytest.mark.parametrize("row", range(len(ATTENTION_CONTRADICTIONS)))
def test_contradicting_settings_are_refused(row: int) -> None:
    fields, message = REFUSED[row]
    pattern = ".*".join(map(re.escape, message.split(".*")))
    with pytest.raises(ValueError, match="TransformerConfig." + pattern):
        _config(**fields)


def test_each_row_is_tested() -> None:
    assert len(REFUSED) == len(ATTENTION_CONTRADICTIONS)


def test_the_spec_and_the_configuration_must_agree_on_the_norm_of_queries_and_keys() -> None:
    spec = get_gpt_layer_local_spec().submodules.self_attention
    with pytest.raises(ValueError, match="must agree on qk_l2_norm, got False in the spec"):
        build_module(spec, config=_config(qk_l2_norm=True), layer_number=1)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("fields", VARIANTS, ids=str)
def test_kernels_on_cuda_agree_with_all_scores_in_memory(fields: dict[str, Any], packed: bool) -> None:
    """bf16 holds 8 bits: outputs and gradients within a few roundings of the largest value, against fp32."""
    length, width = 320, 64
    starts = torch.tensor([0, 100, length], device="cuda")
    pack = PackedSeqParams(qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=220)
    results = []
    for dtype, backend in ((torch.bfloat16, "auto"), (torch.float32, "unfused")):
        config = _config(**fields, attention_backend=backend, hidden_size=HEADS * width)
        with torch.device("cuda"):
            attention = DotProductAttention(config, layer_number=1)
        generator = torch.Generator().manual_seed(1)
        shapes = [(length, 1 if packed else BATCH, n, width) for n in (HEADS, GROUPS, GROUPS)]
        heads = [torch.randn(shape, generator=generator).to("cuda", torch.bfloat16) for shape in shapes]
        heads = [x.to(dtype).requires_grad_() for x in heads]
        context = attention(*heads, None, packed_seq_params=pack if packed else None)
        (context.float() * torch.randn(context.shape, generator=generator).to("cuda")).sum().backward()
        learned = [attention.softmax_offset.grad] if config.softmax_type == "learnable" else []
        results.append([context, *(x.grad for x in heads), *learned])
    for got, true in zip(*results, strict=True):
        # Where a token sees itself alone, queries and keys have no gradient but rounding.
        assert (got.float() - true).abs().max() < 0.02 * true.abs().max() + 1e-5
