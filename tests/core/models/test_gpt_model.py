"""GPTModel's stages, attributes, tied weights and refusals."""

from __future__ import annotations

import copy
import pickle
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megatron.core.extensions import why_missing
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support.tiny_gpt import build_gpt, load_fixture, random_tokens


def test_the_seeded_loss_is_pinned() -> None:
    """A refactoring must not change it; a change of the initial weights must be deliberate."""
    model = build_gpt({"position_embedding_type": "rope"}, init_method_std=0.2, gated_linear_unit=True)
    inputs, positions, labels = random_tokens()
    assert model(inputs, positions, None, labels=labels).mean().item() == pytest.approx(4.136923, abs=1e-5)


def test_two_stages_give_what_one_model_gives() -> None:
    """A stage without embedding starts from set_input_tensor, one without output layer ends in hidden states."""
    whole = build_gpt({"position_embedding_type": "rope"}, num_layers=2)
    first = build_gpt({"position_embedding_type": "rope", "post_process": False}, num_layers=1)
    second = build_gpt({"position_embedding_type": "rope", "pre_process": False}, num_layers=1)
    state = whole.state_dict()
    first.load_state_dict({name: state[name] for name in first.state_dict()})
    second.load_state_dict({name: state[name.replace("layers.0", "layers.1")] for name in second.state_dict()})
    inputs, positions, labels = random_tokens()

    second.set_input_tensor([first(inputs, positions, None)])
    torch.testing.assert_close(second(None, None, None, labels=labels), whole(inputs, positions, None, labels=labels))


def test_a_stage_without_its_input_says_so() -> None:
    inputs, positions, _ = random_tokens()
    with pytest.raises(RuntimeError, match="set_input_tensor"):
        build_gpt({"pre_process": False})(inputs, positions, None)


def test_tied_weights_are_one_parameter_with_the_gradient_of_both_uses() -> None:
    tied = build_gpt({"share_embeddings_and_output_weights": True})
    untied = build_gpt()
    untied.load_state_dict({**tied.state_dict(), "output_layer.weight": tied.embedding.word_embeddings.weight})
    assert "output_layer.weight" not in tied.state_dict()
    assert tied.shared_embedding_or_output_weight() is tied.embedding.word_embeddings.weight
    inputs, positions, labels = random_tokens()
    for model in (tied, untied):
        model(inputs, positions, None, labels=labels).mean().backward()
    gradients = (untied.embedding.word_embeddings.weight.grad, untied.output_layer.weight.grad)
    assert gradients[0] is not None and gradients[1] is not None
    both = gradients[0] + gradients[1]
    torch.testing.assert_close(tied.embedding.word_embeddings.weight.grad, both)


def test_embedding_and_output_weights_are_marked_also_after_to_empty() -> None:
    """``to_empty`` makes new Parameter objects, so ``reset_parameters`` must put the attributes back."""
    with torch.device("meta"):
        model = build_gpt()
    for module in model.modules():
        module.to_empty(device="cpu", recurse=False)
        getattr(module, "reset_parameters", lambda: None)()
    marked = {name for name, p in model.named_parameters() if getattr(p, "is_embedding_or_output_parameter", False)}
    assert marked == {"embedding.word_embeddings.weight", "output_layer.weight"}


def test_positions_default_to_the_order_of_the_tokens() -> None:
    model = build_gpt()
    inputs, positions, _ = random_tokens()
    assert torch.equal(model(inputs, None, None), model(inputs, positions, None))


def test_a_sequence_beyond_the_learned_positions_is_refused() -> None:
    inputs, positions, _ = random_tokens(length=17)
    with pytest.raises(ValueError, match=r"max_sequence_length \(16\), got 17"):
        build_gpt()(inputs, positions, None)


def test_the_rotary_tables_are_made_for_each_length() -> None:
    model = build_gpt({"position_embedding_type": "rope"})
    inputs, positions, _ = random_tokens()
    long = model(inputs, positions, None)
    short = model(inputs[:, :4], positions[:, :4], None)
    torch.testing.assert_close(long[:, :4], short)


def test_a_copy_and_a_pickle_compute_the_same() -> None:
    model = build_gpt({"position_embedding_type": "rope"})
    inputs, positions, _ = random_tokens()
    expected = model(inputs, positions, None)
    assert torch.equal(copy.deepcopy(model)(inputs, positions, None), expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(inputs, positions, None), expected)


def test_the_fused_projection_is_not_kept_for_backward_once_rotated() -> None:
    """Queries and keys are rewritten by the rotation; a value that is a view would keep all three a second time."""
    model = build_gpt({"position_embedding_type": "rope"}, num_layers=1)
    projections: list[torch.Tensor] = []  # held, so that nothing else can get their addresses
    kept: set[int] = set()

    def note_projection(_module: Any, _args: Any, output: Any) -> None:
        projections.append(output[0])

    def note_kept(tensor: torch.Tensor) -> torch.Tensor:
        kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    attention: Any = model.decoder.layers[0].self_attention
    attention.linear_qkv.register_forward_hook(note_projection)
    assert model.rotary_pos_emb is not None
    inputs, positions, _ = random_tokens()
    with torch.autograd.graph.saved_tensors_hooks(note_kept, lambda tensor: tensor):
        attended = attention(model.embedding(inputs, positions), None, model.rotary_pos_emb(inputs.shape[1]))
    assert attended[0].requires_grad and kept and projections[0].untyped_storage().data_ptr() not in kept


def test_angles_serve_as_well_as_tables() -> None:
    """Megatron-Core's ``rotary_pos_emb`` argument, for callers that run a layer themselves."""
    for interleaved in (False, True):
        model = build_gpt({"position_embedding_type": "rope", "rotary_percent": 0.5}, rotary_interleaved=interleaved)
        x = torch.randn(5, 2, 16)
        rope = model.rotary_pos_emb
        assert rope is not None
        cos, sin = rope.get_cos_sin(5, x.device)
        by_tables = model.decoder(x, None, rotary_pos_cos=cos, rotary_pos_sin=sin)
        torch.testing.assert_close(model.decoder(x, None, rotary_pos_emb=rope(5)), by_tables)


def test_megatron_cores_quickstart_configuration_is_accepted() -> None:
    build_gpt(use_cpu_initialization=True, pipeline_dtype=torch.float32)


def test_rotary_tables_made_in_inference_mode_serve_training() -> None:
    model = build_gpt({"position_embedding_type": "rope"})
    inputs, positions, labels = random_tokens()
    with torch.inference_mode():
        model(inputs, positions, None)
    model(inputs, positions, None, labels=labels).mean().backward()


def test_a_block_spec_gives_each_layer_its_own_spec() -> None:
    _, _, settings = load_fixture("llama_like")
    config = TransformerConfig(**settings["config"])
    layer = get_gpt_layer_local_spec(**settings["layer_spec"])
    spec = TransformerBlockSubmodules(layer_specs=[layer, layer], layer_norm=WrappedTorchNorm)
    model = GPTModel(config, spec, **settings["gpt_model"])
    assert set(model.state_dict()) == set(GPTModel(config, layer, **settings["gpt_model"]).state_dict())
    with pytest.raises(ValueError, match=r"num_layers \(2\) specs, got 1"):
        GPTModel(config, TransformerBlockSubmodules(layer_specs=[layer]), **settings["gpt_model"])


def test_bf16_models_compute_near_their_fp32_selves_and_give_fp32_losses() -> None:
    arguments = {"position_embedding_type": "rope"}
    exact = build_gpt(arguments, normalization="RMSNorm", qk_layernorm=True)
    rounded = build_gpt(arguments, normalization="RMSNorm", qk_layernorm=True, bf16=True, params_dtype=torch.bfloat16)
    inputs, positions, labels = random_tokens()
    losses = rounded(inputs, positions, None, labels=labels)
    assert losses.dtype == torch.float32
    assert {p.dtype for p in rounded.parameters()} == {torch.bfloat16}
    # bf16 has 8 bits; losses near log(40) = 3.7 agree to 1 %.
    torch.testing.assert_close(losses, exact(inputs, positions, None, labels=labels), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_an_fp32_residual_stream_stays_fp32_between_bf16_layers(normalization: str) -> None:
    model = build_gpt(
        params_dtype=torch.bfloat16, bf16=True, fp32_residual_connection=True, normalization=normalization
    )
    seen: list[torch.dtype] = []
    for layer in model.decoder.layers:
        layer.register_forward_hook(lambda _module, _args, output: seen.append(output.dtype))
    inputs, positions, labels = random_tokens()
    model(inputs, positions, None, labels=labels).mean().backward()
    assert seen == [torch.float32, torch.float32]
    assert model(inputs, positions, None).dtype == torch.bfloat16


REFUSED_ARGUMENTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"vocab_size": 0}, ValueError, "vocab_size"),
    ({"max_sequence_length": 0}, ValueError, "max_sequence_length"),
    ({"position_embedding_type": "mrope"}, NotImplementedError, "position_embedding_type .* 'mrope'"),
    (
        {"mtp_block_spec": ModuleSpec(module=GPTModel)},
        ValueError,
        "mtp_block_spec must .* be None where a model has none",
    ),
    ({"position_embedding_type": "rope", "rotary_percent": 0.25}, ValueError, "rotary_percent .* 4 . 0.25"),
    *(
        (
            {"pg_collection": ProcessGroupCollection(**cast(Any, {name: SimpleNamespace(size=lambda: 2)}))},
            ValueError,
            rf"{field} \(1\)",
        )
        for name, field in (("tp", "tensor_model_parallel_size"), ("cp", "context_parallel_size"))
    ),
]


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED_ARGUMENTS)
def test_an_argument_that_is_not_served_is_refused_by_name(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        build_gpt(arguments)


@pytest.mark.parametrize("name", ["inference_context", "inference_params", "output_processor"])
def test_a_forward_argument_that_is_not_served_is_refused_by_name(name: str) -> None:
    inputs, positions, _ = random_tokens()
    with pytest.raises(NotImplementedError, match=name):
        build_gpt()(inputs, positions, None, **{name: object()})


def test_a_mask_that_is_not_boolean_is_refused() -> None:
    inputs, positions, _ = random_tokens()
    with pytest.raises(TypeError, match=r"dtype bool .*float32"):
        build_gpt()(inputs, positions, torch.ones(1, 1, 9, 9))


@pytest.mark.parametrize(
    "arguments",
    [
        {"fp8": "hybrid"},
        {"use_kitchen": True},
    ],
)
def test_a_layer_spec_that_is_not_served_is_refused_by_name(arguments: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=next(iter(arguments))):
        get_gpt_layer_local_spec(**arguments)


def test_layers_of_transformer_engine_are_refused_with_the_reason_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    monkeypatch.delitem(sys.modules, "megatron.core.extensions.transformer_engine_layers", raising=False)
    why_missing.cache_clear()
    try:
        with pytest.raises(ImportError, match=r"need that package: ModuleNotFoundError.*get_gpt_layer_local_spec"):
            get_gpt_layer_with_transformer_engine_spec()
    finally:
        why_missing.cache_clear()


def test_spec_and_config_must_agree() -> None:
    """A norm that one names and the other leaves out would silently be another model."""
    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=4)
    with pytest.raises(ValueError, match=r"qk_layernorm, got True in the spec .* False in the config"):
        GPTModel(config, get_gpt_layer_local_spec(qk_layernorm=True), 40, 16)
    with pytest.raises(ValueError, match="'RMSNorm' in the spec and 'LayerNorm' in the config"):
        GPTModel(config, get_gpt_layer_local_spec(normalization="RMSNorm"), 40, 16)
    with pytest.raises(ValueError, match="normalization must be"):
        get_gpt_layer_local_spec(normalization="L2Norm")


@pytest.mark.gpu
def test_cuda_gives_what_the_cpu_gives() -> None:
    """fp32 on both; sums have another order."""
    model, tensors, _ = load_fixture("qwen_like")
    inputs, labels = tensors["tokens"][:, :-1].cuda(), tensors["tokens"][:, 1:].cuda()
    losses = model.cuda()(inputs, None, None, labels=labels)
    losses.mean().backward()
    torch.testing.assert_close(losses.cpu(), tensors["loss"], rtol=0, atol=1e-4)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.cpu(), tensors[f"grad.{key}"], rtol=0, atol=1e-4, msg=key)
