"""The configuration of a GPT model, and its construction."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.extensions import why_missing
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.utils import (
    is_pp_first_stage,
    is_pp_last_stage,
    is_vp_first_stage,
    is_vp_last_stage,
)
from megatron.core.process_groups_config import ProcessGroupCollection, group_rank
from megatron.core.transformer.hybrid_layers import layers_of_pattern
from megatron.core.transformer.linear_attention_checks import LINEAR_ATTENTION_SIZES
from megatron.core.transformer.transformer_config import TransformerConfig

DEVICES_OF_TRANSFORMER_ENGINE: tuple[str, ...] = ("cuda",)

_ARCHITECTURE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "gated_linear_unit",
    "normalization",
    "layernorm_epsilon",
    "layernorm_zero_centered_gamma",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "rotary_interleaved",
)
_VARIANTS = (
    "window_size",
    "window_attn_skip_freq",
    "softmax_type",
    "qk_l2_norm",
    "no_rope_freq",
    "attention_output_gate",
    "glu_linear_offset",
    "activation_func_clamp_value",
    "window_rotary_base",
    "sandwich_layernorm",
    "embedding_scale",
    "softmax_scale",
)
"""Settings that are named where they are not at their defaults."""
_ARCHITECTURE_OF_YARN = (
    "yarn_rotary_scaling_factor",
    "yarn_original_max_position_embeddings",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_mscale",
    "yarn_mscale_all_dim",
    "yarn_correction_range_round_to_int",
)
_ARCHITECTURE_OF_LINEAR_ATTENTION = (
    "experimental_attention_variant",
    "linear_attention_freq",
    *LINEAR_ATTENTION_SIZES,
)
_ARCHITECTURE_OF_HYBRIDS = (
    "hybrid_layer_pattern",
    "mamba_state_dim",
    "mamba_head_dim",
    "mamba_num_groups",
    "mamba_num_heads",
)
_ARCHITECTURE_OF_EXPERTS = (
    "num_moe_experts",
    "moe_layer_freq",
    "moe_ffn_hidden_size",
    "moe_latent_size",
    "moe_apply_probs_on_input",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
    "moe_router_topk",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_topk_scaling_factor",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_enable_expert_bias",
)
_ARCHITECTURE_OF_MLA = (
    "multi_latent_attention",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "rope_type",
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The settings of a GPT model, except the size of its vocabulary, which the tokenizer has."""

    transformer: TransformerConfig

    max_position_embeddings: int
    """Length of the longest sequence that the model supports."""

    position_embedding_type: str = "learned_absolute"
    rotary_base: float = 10000
    rotary_percent: float = 1.0
    rope_scaling: bool = False
    rope_scaling_factor: float = 8.0
    rotary_seq_len_interpolation_factor: float | None = None

    share_embeddings_and_output_weights: bool = True
    """The output layer uses the word embedding's weight."""

    make_vocab_size_divisible_by: int | None = 128
    """The vocabulary is padded to a multiple of it that the tensor-parallel ranks can divide, since matrices of odd sizes are
    slow; None: it is not padded. In Megatron-LM it is multiplied by these ranks. Here, where they divide it, the model does not
    depend on the split."""

    model_vocab_size: int | None = None
    """Ids of the model, with padding; None: the tokenizer's, padded."""

    transformer_impl: str = "transformer_engine"
    """Layers of transformer-engine where it can be used and they are the fastest (in FP8) or ``transformer.layer_kernels`` asks for
    them, else the local ones ("transformer_engine"), or always these ("local")."""

    init_on_meta_device: bool = False
    """The engine creates the weights unit by unit, so that no rank ever has all of them in memory."""

    def __post_init__(self) -> None:
        if self.position_embedding_type not in ("rope", "yarn") or self.transformer.multi_latent_attention:
            return
        if not 0.0 < self.rotary_percent <= 1.0:
            raise ValueError(f"--rotary-percent must be above 0 and at most 1, got {self.rotary_percent}")
        width = int((self.transformer.kv_channels or 0) * self.rotary_percent)
        if width < 2 or width % 2 != 0:
            raise ValueError(
                "rotary positions turn pairs of channels: --kv-channels times --rotary-percent must be even, got "
                f"{self.transformer.kv_channels} * {self.rotary_percent} = {width}"
            )

    def padded_vocab_size(self, vocab_size: int) -> int:
        """Return ``model_vocab_size``, or round ``vocab_size`` up.

        Raises:
            ValueError: ``model_vocab_size`` is smaller, or the tensor-parallel ranks cannot divide what is not to be padded.
        """
        ranks = self.transformer.tensor_model_parallel_size
        if self.model_vocab_size is not None:
            if self.model_vocab_size < vocab_size:
                raise ValueError(
                    f"--padded-vocab-size must be at least the {vocab_size} ids of the tokenizer, got {self.model_vocab_size}"
                )
            return self.model_vocab_size
        if self.make_vocab_size_divisible_by is None:
            if vocab_size % ranks != 0:
                raise ValueError(
                    f"--no-pad-vocab-size needs ids that --tensor-model-parallel-size ({ranks}) divides, got {vocab_size}; "
                    "leave it out"
                )
            return vocab_size
        multiple = math.lcm(self.make_vocab_size_divisible_by, ranks)
        return -(-vocab_size // multiple) * multiple

    def upstream_vocab_size(self, vocab_size: int) -> int:
        """Return the number of ids that Megatron-LM's model has with the same flags."""
        if self.model_vocab_size is not None or self.make_vocab_size_divisible_by is None:
            return self.padded_vocab_size(vocab_size)
        multiple = self.make_vocab_size_divisible_by * self.transformer.tensor_model_parallel_size
        return -(-vocab_size // multiple) * multiple

    def architecture(self, vocab_size: int) -> dict[str, Any]:
        """Return the settings, by name, that two models must have in common to share weights.

        The split of the model is not among them: a checkpoint can be loaded under any split.
        """
        own = (
            "max_position_embeddings",
            "position_embedding_type",
            "rotary_base",
            "rotary_percent",
            "rope_scaling",
            "rope_scaling_factor",
            "rotary_seq_len_interpolation_factor",
            "share_embeddings_and_output_weights",
        )
        names: tuple[str, ...] = (
            _ARCHITECTURE if self.transformer.num_moe_experts is None else _ARCHITECTURE + _ARCHITECTURE_OF_EXPERTS
        )
        if self.transformer.multi_latent_attention:
            names += _ARCHITECTURE_OF_MLA
        if self.transformer.experimental_attention_variant is not None:
            names += _ARCHITECTURE_OF_LINEAR_ATTENTION
        if self.transformer.hybrid_layer_pattern is not None:
            names += _ARCHITECTURE_OF_HYBRIDS
        if self.transformer.mtp_num_layers:
            names += ("mtp_num_layers", "mtp_use_repeated_layer")
        values: dict[str, Any] = {name: getattr(self.transformer, name) for name in names}
        values |= {name: getattr(self, name) for name in own}
        if self.transformer.hybrid_layer_pattern is not None:  # borders of stages are of the split
            values["hybrid_layer_pattern"] = layers_of_pattern(self.transformer.hybrid_layer_pattern)
        values |= _variants(self.transformer)
        if self.position_embedding_type == "yarn":
            values |= {name: getattr(self.transformer, name) for name in _ARCHITECTURE_OF_YARN}
        if self.transformer.use_mup:
            names = (*names, "mup_embedding_mult", "mup_output_mult", "softmax_scale")
            values |= {name: getattr(self.transformer, name) for name in names[-3:]}
        activation = self.transformer.activation_func
        values["activation_func"] = activation if isinstance(activation, str) else activation.__name__
        values["padded_vocab_size"] = self.padded_vocab_size(vocab_size)
        return values


def _variants(config: TransformerConfig) -> dict[str, Any]:
    """Return the settings of ``_VARIANTS`` that are not at their defaults, as they are read back from JSON."""
    values = {name: getattr(config, name) for name in _VARIANTS}
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    return {name: value for name, value in values.items() if value != getattr(TransformerConfig, name)}


def build_gpt_model(
    config: GPTConfig,
    *,
    vocab_size: int,
    device: torch.device,
    pg_collection: ProcessGroupCollection | None = None,
    vp_stage: int | None = None,
) -> GPTModel:
    """Build this rank's part of a GPT model, on ``device`` or, if configured, on the meta device.

    Args:
        vocab_size: the tokenizer's, without padding.
        pg_collection: the process groups over which the model is split; None: it is not split.
        vp_stage: which of the rank's pipeline stages to build, where it has several.

    Raises:
        ImportError: ``config`` asks for FP8, and transformer-engine cannot be used; gives the reason.

    Ranks: each alone; a part has the same initial values as in the whole model.
    """
    stages = None if pg_collection is None else pg_collection.pp
    num_chunks = config.transformer.virtual_pipeline_model_parallel_size
    uses_transformer_engine = _uses_transformer_engine(config, device)
    layers = get_gpt_decoder_block_spec(config.transformer, use_transformer_engine=uses_transformer_engine)
    mtp = get_gpt_mtp_block_spec(config.transformer, layers, uses_transformer_engine, vp_stage, group_rank(stages))
    with torch.device("meta" if config.init_on_meta_device else device):
        return GPTModel(
            config.transformer,
            layers,
            config.padded_vocab_size(vocab_size),
            config.max_position_embeddings,
            pre_process=is_pp_first_stage(stages) and is_vp_first_stage(vp_stage, num_chunks),
            post_process=is_pp_last_stage(stages) and is_vp_last_stage(vp_stage, num_chunks),
            share_embeddings_and_output_weights=config.share_embeddings_and_output_weights,
            position_embedding_type=config.position_embedding_type,  # type: ignore[arg-type]
            rotary_percent=config.rotary_percent,
            rotary_base=config.rotary_base,
            rope_scaling=config.rope_scaling,
            rope_scaling_factor=config.rope_scaling_factor,
            seq_len_interpolation_factor=config.rotary_seq_len_interpolation_factor,
            mtp_block_spec=mtp,
            pg_collection=pg_collection,
            vp_stage=vp_stage,
        )


def why_no_transformer_engine(device_type: str) -> str | None:
    """Return why layers of transformer-engine cannot be used on devices of this type, None if they can."""
    if device_type not in DEVICES_OF_TRANSFORMER_ENGINE:
        return f"it runs on CUDA devices, and these are {device_type}"
    return why_missing("transformer_engine_layers")


def why_no_fp8(config: GPTConfig, device_type: str) -> str | None:
    """Return why the model cannot multiply in FP8 though that was asked for, and what to do; None if it can."""
    if config.transformer.fp8 is None or (reason := why_no_transformer_engine(device_type)) is None:
        return None
    return (
        f"--fp8-format {config.transformer.fp8} needs transformer-engine, which cannot be used: {reason}; install it"
        " (docs/transformer_engine.md), or leave out --fp8-format, which trains in bf16"
    )


def why_local_layers(config: GPTConfig, device_type: str) -> str | None:
    """Return why layers are the local ones though transformer-engine's were asked for; None if nothing is to be said."""
    if config.transformer_impl == "local":
        return None
    if config.transformer.fp8 is None and config.transformer.layer_kernels == "fastest":
        return "in bf16 the framework's own layers are faster, and give the same; --layer-kernels transformer_engine takes its own"
    return why_no_transformer_engine(device_type)


def _uses_transformer_engine(config: GPTConfig, device: torch.device) -> bool:
    if (reason := why_no_fp8(config, device.type)) is not None:
        raise ImportError(reason)
    return config.transformer_impl != "local" and why_local_layers(config, device.type) is None
