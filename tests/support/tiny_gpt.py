"""Small GPT models and the Megatron-LM fixtures, for every test that needs a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

FIXTURES = Path(__file__).parent / "fixtures" / "models"
FIXTURE_NAMES = ("gpt2_like", "llama_like", "qwen_like")
MOE_FIXTURE_NAMES = ("moe_top1_z", "moe_top2")
VOCAB_SIZE, MAX_SEQUENCE_LENGTH = 40, 16


def build_gpt(gpt_arguments: dict[str, Any] | None = None, **config_fields: Any) -> GPTModel:
    """A GPT of 2 layers and 4 heads without dropout, unless told otherwise."""
    fields = {
        "num_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    config = TransformerConfig(**{**fields, **config_fields})
    spec: Any = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
    if config.num_moe_experts is not None:
        spec = get_gpt_decoder_block_spec(config)
    arguments = {"vocab_size": VOCAB_SIZE, "max_sequence_length": MAX_SEQUENCE_LENGTH, **(gpt_arguments or {})}
    return GPTModel(config, spec, **arguments)


def random_tokens(num_samples: int = 2, length: int = 9) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, positions and labels, each [num_samples, length]."""
    tokens = torch.randint(VOCAB_SIZE, (num_samples, length + 1), generator=torch.Generator().manual_seed(7))
    return tokens[:, :-1], torch.arange(length).expand(num_samples, length), tokens[:, 1:]


def load_fixture(name: str) -> tuple[GPTModel, dict[str, torch.Tensor], dict[str, Any]]:
    """The model of a fixture with the fixture's weights, the fixture's tensors, and its settings."""
    settings = json.loads((FIXTURES / f"{name}.json").read_text())
    tensors = load_file(FIXTURES / f"{name}.safetensors")
    # Which dispatcher brings tokens to their experts does not change the numbers.
    settings["config"].pop("moe_token_dispatcher_type", None)
    config = TransformerConfig(**settings["config"], hidden_dropout=0.0, attention_dropout=0.0)
    model = GPTModel(config, get_gpt_layer_local_spec(**settings["layer_spec"]), **settings["gpt_model"])
    weights = {name[len("weight.") :]: value for name, value in tensors.items() if name.startswith("weight.")}
    model.load_state_dict(weights, strict=True)
    return model, tensors, settings
