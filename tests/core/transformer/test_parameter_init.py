"""Initial weights depend on seed, full name and full shape, and on nothing else."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.init_methods import NormalInit
from megatron.core.transformer.parameter_init import parameter_seed
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support.tiny_gpt import build_gpt, random_tokens


def _materialise(model: torch.nn.Module, order: int = 1) -> None:
    """Materialise a model on the meta device as an engine does; ``order`` -1: last module first."""
    for module in list(model.modules())[::order]:
        module.to_empty(device="cpu", recurse=False)
        for tensor in module.parameters(recurse=False):
            torch.nn.init.constant_(tensor, float("nan"))
        getattr(module, "reset_parameters", lambda: None)()


def _assert_same_weights(a: torch.nn.Module, b: torch.nn.Module) -> None:
    other = dict(b.named_parameters())
    assert other.keys() == dict(a.named_parameters()).keys()
    for name, parameter in a.named_parameters():
        assert torch.equal(parameter, other[name]), name


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_meta_initialisation_gives_the_same_bits(order: int, dtype: torch.dtype) -> None:
    """Independently of torch's generators and of the order of modules."""
    arguments = {"position_embedding_type": "rope", "share_embeddings_and_output_weights": True}
    direct = build_gpt(arguments, qk_layernorm=True, params_dtype=dtype)
    torch.rand(3)
    with torch.device("meta"):
        late = build_gpt(arguments, qk_layernorm=True, params_dtype=dtype)
    assert all(parameter.is_meta for parameter in late.parameters())
    _materialise(late, order)
    _assert_same_weights(direct, late)
    inputs, positions, labels = random_tokens()
    assert torch.equal(direct(inputs, positions, None, labels=labels), late(inputs, positions, None, labels=labels))


def test_construction_neither_reads_nor_moves_torchs_generator() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first = build_gpt(init_method=torch.nn.init.xavier_normal_)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(4)
    _assert_same_weights(first, build_gpt(init_method=torch.nn.init.xavier_normal_))


def test_reset_parameters_restores_every_module() -> None:
    model, expected = build_gpt(qk_layernorm=True), build_gpt(qk_layernorm=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(9.0)
    for module in model.modules():
        getattr(module, "reset_parameters", lambda: None)()
    _assert_same_weights(model, expected)


def _weight_of_fc1(layer: Any) -> torch.Tensor:
    return layer.mlp.linear_fc1.weight


def test_weights_follow_the_seed_and_the_name() -> None:
    model, other = build_gpt(), build_gpt(init_seed=5)
    first, second = map(_weight_of_fc1, model.decoder.layers)
    assert not torch.equal(first, second)
    assert not torch.equal(first, _weight_of_fc1(other.decoder.layers[0]))
    deeper = build_gpt(num_layers=3)
    assert torch.equal(first, _weight_of_fc1(deeper.decoder.layers[0]))


def test_the_seed_of_a_parameter_is_pinned() -> None:
    """A change of this number changes every model's start: it breaks resumed comparisons and must be deliberate."""
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    assert parameter_seed(1234, name, torch.Size((64, 16))) == PINNED
    assert parameter_seed(1234, name, torch.Size((16, 64))) != PINNED
    assert 0 <= PINNED < 2**63


PINNED = 8583719614428416625


def test_a_bf16_model_starts_at_the_rounded_weights_of_the_fp32_model() -> None:
    exact, rounded = build_gpt(), build_gpt(params_dtype=torch.bfloat16)
    for (name, a), b in zip(exact.named_parameters(), rounded.parameters(), strict=True):
        assert torch.equal(a.to(torch.bfloat16), b), name


def test_initial_values_follow_megatron_cores_rules() -> None:
    """normal(0, std); the last linear layers divided by sqrt(2 * layers); norms one; biases zero."""
    model = build_gpt(hidden_size=128, num_attention_heads=4, num_layers=2, init_method_std=0.05, qk_layernorm=True)
    for name, parameter in model.named_parameters():
        if name.endswith("layernorm.weight"):
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        elif name.endswith("bias"):
            assert torch.equal(parameter, torch.zeros_like(parameter)), name
        else:
            last = "linear_proj" in name or "linear_fc2" in name
            expected = 0.05 / math.sqrt(2 * 2) if last else 0.05
            # 5,000 samples or more: the estimate of std is within 5 %, of the mean within 5 standard errors.
            assert parameter.std().item() == pytest.approx(expected, rel=0.05), name
            assert abs(parameter.mean().item()) < 5 * expected / math.sqrt(parameter.numel()), name


def test_zero_centred_norms_start_at_zero() -> None:
    norm = build_gpt(layernorm_zero_centered_gamma=True).decoder.final_layernorm
    assert norm is not None and not norm.get_parameter("weight").any()


def test_embeddings_may_have_their_own_init_method() -> None:
    model = build_gpt(embedding_init_method=NormalInit(1.0), hidden_size=64)
    assert model.embedding.word_embeddings.weight.std().item() == pytest.approx(1.0, rel=0.1)
    assert model.output_layer.weight is not None
    assert model.output_layer.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_given_init_methods_fill_their_own_weights() -> None:
    ones, twos = (lambda tensor, value=value: torch.nn.init.constant_(tensor, value) for value in (1.0, 2.0))
    model = build_gpt(init_method=ones, output_layer_init_method=twos)
    layer: Any = model.decoder.layers[0]
    assert layer.mlp.linear_fc1.weight.unique().tolist() == [1.0]
    assert layer.mlp.linear_fc2.weight.unique().tolist() == [2.0]
    assert layer.self_attention.linear_proj.weight.unique().tolist() == [2.0]
    assert model.embedding.word_embeddings.weight.unique().tolist() == [1.0]


def test_without_initialisation_random_weights_are_left_alone_and_constants_are_set() -> None:
    model = build_gpt(perform_initialization=False)
    weight, norm = model.output_layer.weight, model.decoder.final_layernorm
    assert weight is not None and norm is not None
    with torch.no_grad():
        weight.fill_(3.0)
    model.output_layer.reset_parameters()
    assert weight.unique().tolist() == [3.0]
    assert norm.get_parameter("weight").unique().tolist() == [1.0]


def test_a_foreign_module_that_cannot_be_refilled_is_refused_by_name() -> None:
    """Built on the meta device, its parameters could never get their values."""

    class ForeignNorm(torch.nn.Module):
        def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(hidden_size))

    spec = get_gpt_layer_local_spec()
    spec.submodules.input_layernorm = ForeignNorm
    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=4)
    with pytest.raises(
        ValueError, match=r"reset_parameters\(\), got ForeignNorm at 'decoder.layers.0.input_layernorm'"
    ):
        GPTModel(config, spec, 40, 16)


def test_a_module_built_by_itself_is_filled() -> None:
    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=4, init_method_std=0.5)
    layer = get_gpt_layer_local_spec()(config=config)
    assert layer.input_layernorm.weight.unique().tolist() == [1.0]
    assert layer.mlp.linear_fc1.weight.std().item() == pytest.approx(0.5, rel=0.1)
    assert isinstance(ModuleSpec(module=IdentityOp)(), IdentityOp)


@pytest.mark.gpu
def test_cpu_initialisation_gives_cuda_the_weights_of_the_cpu() -> None:
    with torch.device("cuda"):
        on_cuda = build_gpt(use_cpu_initialization=True)
    _assert_same_weights(build_gpt(), on_cuda.cpu())


@pytest.mark.gpu
def test_meta_initialisation_on_cuda_gives_the_bits_of_construction_on_cuda() -> None:
    with torch.device("cuda"):
        direct = build_gpt()
    with torch.device("meta"):
        late = build_gpt()
    for module in late.modules():
        module.to_empty(device="cuda", recurse=False)
        getattr(module, "reset_parameters", lambda: None)()
    _assert_same_weights(direct, late)
