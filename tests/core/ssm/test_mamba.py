"""Mamba-2 in chunks equals its recurrence, a hybrid model equals Nemotron-H of transformers, and what is not served is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.ssm.mamba_mixer import EPSILON, MambaMixer
from megatron.core.ssm.state_layers import DECAY_RATES
from megatron.core.ssm.state_space_scan import state_space_scan
from megatron.core.transformer.hybrid_layers import HYBRID_CONTRADICTIONS, KERNEL
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.training.arguments import parse_settings
from megatron.training.cli.flag_parser import FlagError
from megatron.training.formats.megatron_lm import layout_of
from megatron.training.telemetry.flops import flops_per_sample
from tests.support.huggingface_models import FOLDER, expected, expected_gradients, stored_tensors
from tests.support.launch_lines import SMALLEST

BATCH, GROUPS, HEADS, WIDTH, STATE, HIDDEN = 2, 2, 6, 3, 5, 16
RATIO = HEADS // GROUPS
BASE: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "init_method_std": 0.5,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "hybrid_layer_pattern": "M-*M",
    "mamba_state_dim": STATE,
    "mamba_head_dim": WIDTH,
    "mamba_num_groups": GROUPS,
    "mamba_num_heads": HEADS,
}


def _config(**fields: Any) -> TransformerConfig:
    return TransformerConfig(**{**BASE, **fields})


def _model(config: TransformerConfig, vocab_size: int = 40) -> GPTModel:
    return GPTModel(config, get_gpt_decoder_block_spec(config), vocab_size, 64, position_embedding_type="none")


def _first_mixer(config: TransformerConfig) -> MambaMixer:
    layer = _model(config).decoder.layers[0]
    assert isinstance(layer, MambaLayer) and isinstance(layer.mixer, MambaMixer)
    return layer.mixer


def _mixer(config: TransformerConfig) -> MambaMixer:
    mixer = _first_mixer(config)
    for parameter in mixer.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
    return mixer


def _token_by_token(
    x: torch.Tensor, step: torch.Tensor, rate: torch.Tensor, write: torch.Tensor, read: torch.Tensor
) -> torch.Tensor:
    """The recurrence as its definition says it, for every head [s, b, h, ...]."""
    ratio = x.shape[2] // write.shape[2]
    write, read = (part.repeat_interleave(ratio, dim=2) for part in (write, read))
    state, rows = x.new_zeros(*x.shape[1:3], write.shape[-1], x.shape[-1]), []
    for own, dt, b, c in zip(x, step, write, read, strict=True):
        state = (-dt * rate).exp()[..., None, None] * state + torch.einsum("bhn,bhp->bhnp", b, dt[..., None] * own)
        rows.append(torch.einsum("bhn,bhnp->bhp", c, state))
    return torch.stack(rows)


@pytest.mark.parametrize("length", [1, 8, 21])
def test_chunks_are_the_recurrence(length: int) -> None:
    """Outputs and all gradients, in fp32, with a last chunk that is full, short, or the only one."""
    generator = torch.Generator().manual_seed(length)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    inputs = [draw(length, BATCH, HEADS, WIDTH), F.softplus(draw(length, BATCH, HEADS)), F.softplus(draw(HEADS))]
    inputs += [draw(length, BATCH, GROUPS, STATE), draw(length, BATCH, GROUPS, STATE)]
    inputs = [tensor.requires_grad_() for tensor in inputs]
    found, true = state_space_scan(*inputs, chunk=4), _token_by_token(*inputs)
    torch.testing.assert_close(found, true, atol=1e-5, rtol=1e-5)
    weights = draw(*true.shape)
    grads = torch.autograd.grad((found * weights).sum(), inputs)
    for grad, own in zip(grads, torch.autograd.grad((true * weights).sum(), inputs), strict=True):
        torch.testing.assert_close(grad, own, atol=2e-5, rtol=1e-4)


def test_states_that_are_forgotten_at_once_give_no_nan() -> None:
    step = torch.full((9, 1, 1), 1000.0, requires_grad=True)
    x, write = torch.ones(9, 1, 1, 1), torch.ones(9, 1, 1, 1)
    found = state_space_scan(x, step, torch.ones(1), write, write, chunk=4)
    torch.testing.assert_close(found, torch.full_like(found, 1000.0))
    found.sum().backward()
    assert step.grad is not None and step.grad.isfinite().all()


def _written_out(mixer: MambaMixer, hidden: torch.Tensor) -> torch.Tensor:
    """One sequence, one head and one token at a time."""
    mixed = (hidden @ mixer.in_proj.weight.T).unflatten(-1, (GROUPS, -1))
    wide = RATIO * WIDTH
    gates, channels, steps = mixed.split([wide, wide + 2 * STATE, RATIO], dim=-1)
    kernels = mixer.conv1d.weight[:, 0].unflatten(0, (GROUPS, -1))
    assert mixer.conv1d.bias is not None
    biases, weights = mixer.conv1d.bias.unflatten(0, (GROUPS, -1)), mixer.norm.weight.unflatten(0, (GROUPS, -1))
    outputs = []
    for row in range(hidden.shape[1]):
        groups = []
        for group in range(GROUPS):
            states, tokens = [torch.zeros(STATE, WIDTH) for _ in range(RATIO)], []
            for token in range(hidden.shape[0]):
                seen = range(max(0, token - KERNEL + 1), token + 1)
                mix = sum(channels[at, row, group] * kernels[group, :, KERNEL - 1 - token + at] for at in seen)
                x, write, read = F.silu(mix + biases[group]).split([wide, STATE, STATE])
                heads = []
                for own in range(RATIO):
                    head, value = group * RATIO + own, x.unflatten(0, (RATIO, WIDTH))[own]
                    dt = F.softplus(steps[token, row, group, own] + mixer.dt_bias[head])
                    decay = torch.exp(-dt * mixer.A_log[head].exp())
                    states[own] = decay * states[own] + dt * torch.outer(write, value)
                    heads.append(read @ states[own] + mixer.D[head] * value)
                gated = torch.cat(heads) * F.silu(gates[token, row, group])
                tokens.append(gated / (gated.square().mean() + EPSILON).sqrt() * weights[group])
            groups.append(torch.stack(tokens))
        outputs.append(torch.cat(groups, dim=-1))
    return torch.stack(outputs, dim=1) @ mixer.out_proj.weight.T


@pytest.mark.parametrize(
    "fields", [{}, {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}], ids=str
)
def test_a_mixer_is_what_is_written_out(fields: dict[str, Any]) -> None:
    """Outputs and the gradients of input and all weights, in fp32, whose sums have another order."""
    mixer = _mixer(_config(**fields))
    hidden = torch.randn(7, BATCH, HIDDEN, generator=torch.Generator().manual_seed(3), requires_grad=True)
    (found, bias), true = mixer(hidden), _written_out(mixer, hidden)
    assert bias is None
    torch.testing.assert_close(found, true, atol=1e-5, rtol=1e-4)
    leaves = [hidden, *mixer.parameters()]
    weights = torch.randn(true.shape, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad((found * weights).sum(), leaves)
    for grad, own in zip(grads, torch.autograd.grad((true * weights).sum(), leaves), strict=True):
        torch.testing.assert_close(grad, own, atol=1e-4, rtol=1e-3)


def test_initial_values_are_megatron_cores() -> None:
    config = _config()
    mixer = _first_mixer(config)
    rates, steps = mixer.A_log.detach().exp(), F.softplus(mixer.dt_bias.detach())
    assert DECAY_RATES[0] <= float(rates.min()) and float(rates.max()) <= DECAY_RATES[1]
    assert float(steps.min()) >= 1e-3 * 0.99 and float(steps.max()) <= 0.1 * 1.01
    assert torch.equal(mixer.D, torch.ones(HEADS)) and torch.equal(mixer.norm.weight, torch.ones(HEADS * WIDTH))
    assert config.output_layer_init_method.std == pytest.approx(0.5 / 2)  # one sublayer for each of four layers


def _in_groups(rows: torch.Tensor, widths: list[int], groups: int) -> torch.Tensor:
    """Rows that are one kind behind the other, group by group."""
    kinds = [part.unflatten(0, (groups, -1)) for part in rows.split([groups * width for width in widths])]
    return torch.cat(kinds, dim=1).flatten(0, 1)


def _from_nemotron_h(tensors: dict[str, torch.Tensor], config: TransformerConfig, root: str) -> dict[str, torch.Tensor]:
    """The tensors of ours from those of transformers' Nemotron-H."""
    groups, state, ratio = config.mamba_num_groups, config.mamba_state_dim, (config.mamba_num_heads or 0) // 2
    wide, found = ratio * config.mamba_head_dim, {}
    for layer, kind in enumerate(config.hybrid_layer_pattern or ""):
        there, own = f"{root}.layers.{layer}.", f"decoder.layers.{layer}."
        mixer = {key.removeprefix(there + "mixer."): value for key, value in tensors.items() if there + "mixer." in key}
        norm = {"M": "norm", "-": "pre_mlp_layernorm", "*": "input_layernorm"}[kind]
        found[f"{own}{norm}.weight"] = tensors[there + "norm.weight"]
        if kind == "M":
            mixer["in_proj.weight"] = _in_groups(mixer["in_proj.weight"], [wide, wide, state, state, ratio], groups)
            for part in ("weight", "bias"):
                mixer[f"conv1d.{part}"] = _in_groups(mixer[f"conv1d.{part}"], [wide, state, state], groups)
            found |= {f"{own}mixer.{key}": value for key, value in mixer.items()}
        elif kind == "-":
            found |= {
                f"{own}mlp.linear_fc{number}.weight": mixer[f"{name}_proj.weight"]
                for number, name in ((1, "up"), (2, "down"))
            }
        else:
            query, key, value = (mixer[f"{letter}_proj.weight"].unflatten(0, (2, -1)) for letter in "qkv")
            found[f"{own}self_attention.linear_qkv.weight"] = torch.cat((query, key, value), dim=1).flatten(0, 1)
            found[f"{own}self_attention.linear_proj.weight"] = mixer["o_proj.weight"]
    return found | {
        "embedding.word_embeddings.weight": tensors[f"{root}.embeddings.weight"],
        "decoder.final_layernorm.weight": tensors[f"{root}.norm_f.weight"],
        "output_layer.weight": tensors["lm_head.weight"],
    }


def test_logits_and_gradients_are_those_of_transformers() -> None:
    """fp32, so the two differ by the order of sums alone."""
    config = _config(
        num_query_groups=2,
        kv_channels=8,
        ffn_hidden_size=24,
        activation_func="squared_relu",
        mamba_state_dim=6,
        mamba_head_dim=5,
        mamba_num_heads=4,
    )
    model = _model(config)
    model.load_state_dict(_from_nemotron_h(stored_tensors(FOLDER / "nemotron_h"), config, "backbone"), strict=True)
    tokens, logits = expected("nemotron_h")
    torch.testing.assert_close(model(tokens, None, None), logits, atol=1e-5, rtol=1e-5)
    model(tokens[:, :-1], None, None, labels=tokens[:, 1:]).mean().backward()
    true = _from_nemotron_h(expected_gradients("nemotron_h"), config, "model")
    for name, parameter in model.named_parameters():
        bound = max(1e-6, 5e-6 * float(true[name].abs().max()))
        torch.testing.assert_close(parameter.grad, true[name], atol=bound, rtol=1e-4, msg=name)


def test_a_hybrid_model_of_callers_is_a_gpt_model_with_the_pattern() -> None:
    config = _config(hybrid_layer_pattern=None, is_hybrid_model=True)
    with pytest.raises(ValueError, match="is_hybrid_model must be False without hybrid_layer_pattern"):
        _model(config)
    tokens, positions = torch.arange(8).view(1, 8), torch.arange(8).view(1, 8)
    expected = _model(_config())
    for spec in (hybrid_stack_spec, hybrid_stack_spec(_config())):
        model = HybridModel(config, spec, 40, 64, hybrid_layer_pattern="M-*M")
        assert model.config.hybrid_layer_pattern == "M-*M" and config.hybrid_layer_pattern is None
        model.load_state_dict(expected.state_dict())
        torch.testing.assert_close(model(tokens, positions, None), expected(tokens, positions, None))
    earlier = HybridModel(config, hybrid_stack_spec, 40, 64, hybrid_override_pattern="M-*M")
    assert [name for name, _ in earlier.named_parameters()] == [name for name, _ in expected.named_parameters()]
    with pytest.raises(ValueError, match="must be one pattern, got"):
        HybridModel(_config(), hybrid_stack_spec, 40, 64, hybrid_layer_pattern="MMMM")
    with pytest.raises(ValueError, match=r"must be one pattern, got \[\]"):
        HybridModel(config, hybrid_stack_spec, 40, 64)
    with pytest.raises(NotImplementedError, match="hybrid_attention_ratio"):
        HybridModel(config, hybrid_stack_spec, 40, 64, "M-*M", hybrid_attention_ratio=0.5)


def test_layers_follow_the_pattern() -> None:
    config = _config(num_layers=5, hybrid_layer_pattern="M-*|ME", num_moe_experts=4, pipeline_model_parallel_size=2)
    assert str(config.pipeline_model_parallel_layout) == str(
        _config(
            num_layers=5,
            hybrid_layer_pattern="M-*ME",
            num_moe_experts=4,
            pipeline_model_parallel_size=2,
            pipeline_model_parallel_layout="Ettt|ttL",
        ).pipeline_model_parallel_layout
    )
    whole = _model(_config(num_layers=5, hybrid_layer_pattern="M-*|ME", num_moe_experts=4))
    kinds = [
        (isinstance(layer, MambaLayer), getattr(layer, "has_attention", False), getattr(layer, "has_mlp", False))
        for layer in whole.decoder.layers
    ]
    mamba, mlp = (True, False, False), (False, False, True)
    assert kinds == [mamba, mlp, (False, True, False), mamba, mlp]
    assert [name for name, _ in whole.named_parameters() if "router" in name] == ["decoder.layers.4.mlp.router.weight"]


def test_flops_count_the_layers_that_there_are() -> None:
    """A Mamba layer: projections, convolution, and two products with each head's state; no square of the sequence."""
    sizes: dict[str, Any] = {"seq_length": 32, "vocab_size": 64}
    channels, both = HEADS * WIDTH, 2 * GROUPS * STATE
    mamba = HIDDEN * (3 * channels + both + HEADS) + KERNEL * (channels + both) + 2 * channels * STATE
    counts = {
        pattern: flops_per_sample(_config(num_layers=len(pattern), hybrid_layer_pattern=pattern), **sizes)
        for pattern in ("-", "-M", "-*", "--")
    }
    assert counts["-M"] - counts["-"] == 6 * 32 * mamba
    assert counts["--"] - counts["-"] == 6 * 32 * 2 * HIDDEN * 4 * HIDDEN
    assert counts["-*"] - counts["-"] == 6 * 32 * 4 * HIDDEN**2 + 3 * 32 * 32 * 2 * HIDDEN


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"hybrid_layer_pattern": "M-G*"}, "hybrid_layer_pattern must be of M .* got 'M-G\\*'"),
    ({"hybrid_layer_pattern": "M-*"}, "num_layers must be the number of layers of hybrid_layer_pattern, got 4"),
    ({"hybrid_layer_pattern": "M-*E"}, "num_moe_experts must be given where hybrid_layer_pattern has E"),
    ({"mamba_state_dim": 0}, "mamba_state_dim must be at least 1, got 0"),
    ({"mamba_head_dim": 0}, "mamba_head_dim must be at least 1, got 0"),
    ({"mamba_num_groups": 0}, "mamba_num_groups must be at least 1, got 0"),
    ({"mamba_num_heads": -1}, "mamba_num_heads must be at least 1"),
    ({"mamba_num_heads": None}, "2 \\* hidden_size must be a multiple of mamba_head_dim, got hidden_size 16 and 3"),
    ({"mamba_num_heads": 5}, "the heads of Mamba must be a multiple of mamba_num_groups, got mamba_num_heads 5"),
    (
        {"tensor_model_parallel_size": 4},
        "mamba_num_groups must be a multiple of tensor_model_parallel_size, got 2 and 4",
    ),
    (
        {"fp8": "hybrid", "bf16": True, "params_dtype": torch.bfloat16},
        "fp8 must go with Mamba layers whose projection has a multiple of 16 rows",
    ),
    ({"context_parallel_size": 2}, "context_parallel_size must be 1 with hybrid_layer_pattern, got 2"),
    ({"mtp_num_layers": 1}, "mtp_num_layers must be None with hybrid_layer_pattern, got 1"),
    (
        {"hybrid_layer_pattern": "M-*E", "num_moe_experts": 4, "moe_layer_freq": [1, 0, 0, 0]},
        "moe_layer_freq must be 1 with hybrid_layer_pattern",
    ),
    ({"sandwich_layernorm": True}, "sandwich_layernorm must be False with hybrid_layer_pattern"),
    (
        {"experimental_attention_variant": "gdn", "linear_attention_freq": 2, "activation_func": F.silu},
        "experimental_attention_variant must be None with hybrid_layer_pattern",
    ),
    ({"multi_latent_attention": True}, "multi_latent_attention must be False with hybrid_layer_pattern"),
]


def test_each_row_of_the_table_has_a_case() -> None:
    assert len(REFUSED) == len(HYBRID_CONTRADICTIONS)


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_contradicts_is_refused(fields: dict[str, Any], message: str) -> None:
    kind = MLATransformerConfig if "multi_latent_attention" in fields else TransformerConfig
    with pytest.raises(ValueError, match=message):
        kind(**{**BASE, **fields})


def test_a_launch_line_of_a_hybrid_model_is_read_and_what_its_spec_says_is_checked() -> None:
    """The pattern gives the number of layers; only Megatron-LM's own stack may be named."""
    flags = [*SMALLEST.replace("--num-layers 2", "").split(), "--mamba-head-dim", "8", "--mamba-num-groups", "2"]
    stack = ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"]
    settings = parse_settings([*flags, "--hybrid-override-pattern", "M-*", "--spec", *stack], world_size=1)
    assert settings.model.transformer.num_layers == 3 and settings.model.transformer.hybrid_layer_pattern == "M-*"
    with pytest.raises(FlagError, match="--spec must be Megatron-LM's of hybrid models"):
        parse_settings([*flags, "--hybrid-layer-pattern", "M-*", "--spec", "my.module", "layers"], world_size=1)


def test_packs_and_checkpoints_of_megatron_lm_are_refused() -> None:
    model = _model(_config())
    pack = PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor([0, 4, 8]))
    with pytest.raises(NotImplementedError, match="packed_seq_params must be None with Mamba"):
        model(torch.zeros(1, 8, dtype=torch.long), None, None, packed_seq_params=pack)
    with pytest.raises(NotImplementedError, match="checkpoints of hybrid models must be ours"):
        layout_of("torch_dist", {"hybrid_layer_pattern": "M"}, iteration=1)


def test_a_file_of_expected_values_has_gradients_of_all_weights() -> None:
    stored, grads = stored_tensors(FOLDER / "nemotron_h"), load_file(FOLDER / "nemotron_h.safetensors")
    assert {f"grad.{key.replace('backbone.', 'model.')}" for key in stored} == grads.keys() - {"tokens", "logits"}
