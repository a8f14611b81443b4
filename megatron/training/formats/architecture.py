"""What a model's settings say of its tensors, and how the settings of two models are compared."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

Architecture = Mapping[str, Any]
_OF_ROPE = (
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "rope_scaling",
    "rotary_seq_len_interpolation_factor",
)

_OF_ROTATION = (
    "rotary_base",
    "window_rotary_base",
    "rope_scaling",
    "rope_scaling_factor",
    "rotary_seq_len_interpolation_factor",
    "rope_type",
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "yarn_rotary_scaling_factor",
    "yarn_original_max_position_embeddings",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_mscale",
    "yarn_mscale_all_dim",
    "yarn_correction_range_round_to_int",
)
"""They have no weights, and another training may go on with others, as for longer contexts."""


def exact(value: float | str) -> int | float:
    """Return a finite number as it is written: an integer where it is whole, so that it prints and is saved as one.

    Raises:
        ValueError: it is none.
    """
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"must be a finite number, got {value!r}")
    return int(number) if number.is_integer() else number


def build_model(architecture: Architecture, **fields_of_config: Any) -> GPTModel:
    """Build the model of these settings from our own layers, on torch's default device and without dropout.

    Args:
        fields_of_config: further fields of its TransformerConfig.
    """
    kind = MLATransformerConfig if architecture.get("multi_latent_attention") else TransformerConfig
    known = {field.name for field in fields(kind)}
    settings = {name: value for name, value in architecture.items() if name in known}
    config = kind(**settings, hidden_dropout=0.0, attention_dropout=0.0, **fields_of_config)
    layers = get_gpt_decoder_block_spec(config)
    return GPTModel(
        config,
        layers,
        architecture["padded_vocab_size"],
        architecture["max_position_embeddings"],
        share_embeddings_and_output_weights=architecture["share_embeddings_and_output_weights"],
        position_embedding_type=architecture["position_embedding_type"],
        rotary_percent=architecture["rotary_percent"],
        rotary_base=architecture["rotary_base"],
        rope_scaling=architecture["rope_scaling"],
        rope_scaling_factor=architecture["rope_scaling_factor"],
        seq_len_interpolation_factor=architecture["rotary_seq_len_interpolation_factor"],
        mtp_block_spec=get_gpt_mtp_block_spec(config, layers, use_transformer_engine=False),
    )


def tensor_sizes(architecture: Architecture) -> dict[str, torch.Size]:
    """Return the shapes of the whole model's tensors by their names in checkpoints; nothing is allocated."""
    parameters, buffers = sizes_of(architecture)
    return {**parameters, **buffers}


def sizes_of(architecture: Architecture) -> tuple[dict[str, torch.Size], dict[str, torch.Size]]:
    """Return the shapes of the whole model's parameters, and those of its buffers, by their names in checkpoints."""
    # What scales numbers or chooses experts shapes nothing, and may need settings that no architecture names.
    shaping = {name: value for name, value in architecture.items() if not name.startswith("mup_")}
    if shaping.get("moe_router_topk") == 1:
        shaping["moe_router_pre_softmax"] = True
    with torch.device("meta"):
        model = build_model(shaping)
    buffers = {}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                buffers[f"{prefix}.{name}"] = buffer.shape
    return {name: parameter.shape for name, parameter in model.named_parameters()}, buffers


def comparable(architecture: Architecture) -> dict[str, Any]:
    """Return the settings that say what the model computes, each in one spelling, without the size of the vocabulary.

    Positions that rotate have no weights, so their largest number says nothing.
    """
    settings = dict(architecture)
    settings.pop("padded_vocab_size", None)
    # Layers of multi-token prediction may be left out, and which a checkpoint has, its tensors say.
    settings.pop("mtp_num_layers", None)
    settings.pop("mtp_use_repeated_layer", None)
    if settings.get("position_embedding_type") != "learned_absolute":
        settings.pop("max_position_embeddings", None)
    size, windows = windows_of_layers(settings)
    settings |= {"window_size": None if size is None else [size, 0], "window_attn_skip_freq": windows}
    if settings.get("multi_latent_attention"):
        settings = _comparable_latent(settings)
    elif settings.get("position_embedding_type") not in ("rope", "yarn"):
        for name in _OF_ROPE:
            settings.pop(name, None)
    if not settings.get("rope_scaling"):
        settings.pop("rope_scaling_factor", None)
    if settings.get("experimental_attention_variant") is not None:
        settings["linear_attention_freq"] = layers_with_linear_attention(settings)
    if settings.get("moe_layer_freq") is not None:
        settings["moe_layer_freq"] = layers_with_experts(settings)
        settings["moe_ffn_hidden_size"] = settings.get("moe_ffn_hidden_size") or settings["ffn_hidden_size"]
        if not settings.get("moe_shared_expert_intermediate_size"):
            settings.pop("moe_shared_expert_intermediate_size", None)
            settings.pop("moe_shared_expert_gate", None)
        settings["moe_router_topk_scaling_factor"] = settings.get("moe_router_topk_scaling_factor") or 1.0
        for name in (
            "moe_router_num_groups",
            "moe_router_group_topk",
            "moe_router_enable_expert_bias",
            "moe_latent_size",
            "moe_apply_probs_on_input",
        ):
            if not settings.get(name):
                settings.pop(name, None)
        if all(settings["moe_layer_freq"]):
            settings.pop("ffn_hidden_size", None)
    return settings


def _comparable_latent(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a model with multi-latent attention, which rotates whatever the type of positions is."""
    without = {"kv_channels", "num_query_groups", "rotary_interleaved", "add_qkv_bias", "rope_scaling"}
    without |= {"rotary_seq_len_interpolation_factor"}
    if settings["position_embedding_type"] != "learned_absolute":
        settings["position_embedding_type"] = "rope"
    if settings["rotary_scaling_factor"] <= 1.0:
        # YaRN's frequencies are the usual ones, and its factors one.
        settings["rope_type"] = "rope"
        without |= {"rotary_scaling_factor", "mscale_all_dim"}
    if settings["rope_type"] == "rope":
        without |= {"original_max_position_embeddings", "beta_fast", "beta_slow", "mscale"}
        if settings["mscale_all_dim"] == 0.0:
            without |= {"rotary_scaling_factor", "mscale_all_dim"}
    return {name: value for name, value in settings.items() if name not in without}


def windows_of_layers(settings: Architecture) -> tuple[int | None, list[int]]:
    """Return how many earlier positions a window has (None: no layer has one), and 1 for each layer with a window."""
    size, layers = settings.get("window_size"), range(settings["num_layers"])
    skips = settings.get("window_attn_skip_freq")
    if size is None or size[0] < 0:
        return None, [0 for _ in layers]
    if skips is None:
        skips = [1 for _ in layers]
    elif isinstance(skips, int):
        skips = [int((layer + 1) % skips != 0) for layer in layers]
    return (size[0] if any(skips) else None), list(skips)


def layers_with_experts(architecture: Architecture) -> list[int]:
    """Return 1 for each layer with experts and 0 for each dense one."""
    frequency = architecture.get("moe_layer_freq", 1)
    if isinstance(frequency, int):
        return [int(layer % frequency == 0) for layer in range(architecture["num_layers"])]
    return list(frequency)


def layers_with_linear_attention(architecture: Architecture) -> list[int]:
    """Return 1 for each layer with linear attention and 0 for others."""
    frequency, layers = architecture.get("linear_attention_freq"), range(1, architecture["num_layers"] + 1)
    if frequency is None:
        return [0 for _ in layers]
    return [int(layer % frequency != 0) for layer in layers] if isinstance(frequency, int) else list(frequency)


@dataclass(frozen=True)
class Differences:
    """How the settings of a checkpoint and those of the run differ, a text for each."""

    refused: list[str]
    taken: list[str]
    """What is the command line's, with ``--finetune``."""

    way_out: str = ""
    """What else can be done, behind other remedies."""

    @property
    def said(self) -> str:
        """One line on what is taken; empty: nothing is."""
        return f" --finetune: settings without weights are the command line's ({', '.join(self.taken)})" * bool(
            self.taken
        )


def differences(saved: Architecture, own: Architecture, *, finetune: bool = False) -> Differences:
    """Compare settings as they are spelled; see ``comparable``.

    Args:
        finetune: another training begins, for which settings without weights may be others.
    """
    found = {
        name: f"{name}: now {own.get(name)}, saved {saved.get(name)}"
        for name in {**own, **saved}
        if own.get(name) != saved.get(name)
    }
    free = _without_weights(saved, own)
    taken = {name: text for name, text in found.items() if finetune and name in free}
    way_out = ", or --finetune, which takes settings without weights from the command line and begins at iteration 0"
    return Differences(
        [text for name, text in found.items() if name not in taken],
        list(taken.values()),
        way_out if not finetune and found.keys() & free else "",
    )


def _without_weights(saved: Architecture, own: Architecture) -> set[str]:
    """Return the names of what a model may have anew with another's weights: how positions rotate, and how many there are."""
    kinds = {settings.get("position_embedding_type") for settings in (saved, own)}
    names = set(_OF_ROTATION)
    if "learned_absolute" not in kinds:
        names.add("max_position_embeddings")
    if kinds <= {"rope", "yarn"}:
        names.add("position_embedding_type")
    return names
