"""Maximal update parametrisation: a plain model with scaled parts, and rates by width."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support.tiny_gpt import MAX_SEQUENCE_LENGTH, VOCAB_SIZE, random_tokens

WIDTH, BASE = 32, 8
FIELDS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": WIDTH,
    "num_attention_heads": 4,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
MUP: dict[str, Any] = {"use_mup": True, "mup_base_hidden_size": BASE}


def _build(tied: bool = False, **fields: Any) -> GPTModel:
    config = TransformerConfig(**{**FIELDS, **fields})
    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        VOCAB_SIZE,
        MAX_SEQUENCE_LENGTH,
        share_embeddings_and_output_weights=tied,
    )


def test_scales_follow_from_the_widths() -> None:
    config = TransformerConfig(**FIELDS, **MUP)
    assert (config.mup_width_mult, config.mup_output_mult, config.softmax_scale) == (4.0, 0.25, 1 / 8)
    given = TransformerConfig(
        **FIELDS, **MUP, mup_base_head_dim=4, mup_attn_scale_power=0.5, mup_output_mult=3.0, softmax_scale=None
    )
    assert given.mup_output_mult == 3.0 and given.softmax_scale == pytest.approx(2 / math.sqrt(8))
    assert TransformerConfig(**FIELDS, use_mup=True).mup_width_mult == 1.0


@pytest.mark.parametrize("tied", [False, True])
def test_logits_and_gradients_are_those_of_a_plain_model_with_scaled_parts(tied: bool) -> None:
    """The plain one has the same weights and scale of scores; its embeddings and its logits are scaled by hand."""
    model = _build(tied, **MUP, mup_embedding_mult=3.0)
    plain = _build(tied, softmax_scale=1 / 8)
    plain.load_state_dict(model.state_dict())
    plain.embedding.register_forward_hook(lambda _, __, output: 3.0 * output)
    plain.output_layer.register_forward_hook(lambda _, __, output: (0.25 * output[0], output[1]))
    inputs, positions, labels = random_tokens()
    for one in (model, plain):
        one(inputs, positions, None, labels=labels).mean().backward()
    torch.testing.assert_close(model(inputs, positions, None), plain(inputs, positions, None))
    for (name, ours), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name)


def test_initial_weights_scale_with_the_width() -> None:
    """Hidden matrices by 1 / sqrt of it, embeddings and the output layer not."""
    wide, plain = _build(**MUP), _build()
    for (name, ours), (_, theirs) in zip(wide.named_parameters(), plain.named_parameters(), strict=True):
        if theirs.dim() > 1:
            factor = 1.0 if "embedding" in name or name == "output_layer.weight" else 0.5
            torch.testing.assert_close(ours, factor * theirs, msg=name)


@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize("decoupled", [None, 0.7])
def test_rates_of_hidden_matrices_scale_with_the_width(kind: str, decoupled: float | None) -> None:
    model = _build(**MUP)
    config = OptimizerConfig(optimizer=kind, lr=0.4, min_lr=0.04, decoupled_lr=decoupled, weight_decay=0.1)
    optimizer = get_megatron_optimizer(config, [model])
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=0.4, min_lr=0.04, lr_warmup_steps=0, lr_decay_steps=10, lr_decay_style="linear",
        start_wd=0.1, end_wd=0.1, wd_incr_steps=10, wd_incr_style="constant",
    )  # fmt: skip
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for consumed, base in ((0, 0.4), (10, 0.04)):
        scheduler.step(consumed)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names[id(parameter)]
                own = decoupled is not None and name in ("embedding.word_embeddings.weight", "output_layer.weight")
                is_hidden = parameter.dim() > 1 and "embedding" not in name and name != "output_layer.weight"
                factor = (0.25 if is_hidden else 1.0) if kind == "adam" else (1.0 if is_hidden else 4.0)
                expected = (decoupled if consumed == 0 else 0.04) if own else base * factor
                assert group["lr"] == pytest.approx(expected), (name, consumed)
                if kind == "adam":
                    assert group["eps"] == pytest.approx(1e-8 * (0.25 if is_hidden else 1.0)), name
