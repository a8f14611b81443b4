"""Families of models of ``transformers``, ``timm`` and ``diffusers``, made tiny from their configurations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

VOCABULARY = 64
_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_GROUPED = {
    **_SIZES,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "max_position_embeddings": 64,
}
_EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True}
_OF_IMAGES = {"image_size": 16, "patch_size": 8}


@dataclass(frozen=True)
class Family:
    """A model and its inputs.

    Args:
        build: makes the model, on the default device.
        inputs: makes a batch out of a generator; ``loss`` is of the model's output, or of what it returns.
        loss: computes the loss of a model on a batch.
        units: classes that become units. None: the model is of ``transformers``, and says so itself.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], dict[str, Any]]
    loss: Callable[[nn.Module, dict[str, Any]], torch.Tensor]
    units: Sequence[str] | None = None


def without_dropout(model: Any) -> Any:
    """Switch dropout off, which each rank would draw for itself."""
    for module in model.modules():
        for name, value in vars(module).items():
            if (isinstance(value, float) and "drop" in name) or (isinstance(module, nn.Dropout) and name == "p"):
                setattr(module, name, 0.0)
    return model


def _tokens(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (2, 9), generator=generator)


def _images(generator: torch.Generator, size: int = 16, num_channels: int = 3) -> torch.Tensor:
    return torch.randn(2, num_channels, size, size, generator=generator)


def _own_loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def _square(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    output = model(**batch)
    values = output if isinstance(output, torch.Tensor) else output[0]
    return values.float().square().mean()


def _of_config(name: str, config: str, **fields: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        made = getattr(transformers, config)(**fields)
        for field, value in vars(made).items():
            if isinstance(value, float) and "drop" in field:
                setattr(made, field, 0.0)
        model: nn.Module = getattr(transformers, name)(made)
        return model

    return build


def _decoder(name: str, config: str, **fields: Any) -> Family:
    def inputs(generator: torch.Generator) -> dict[str, Any]:
        tokens = _tokens(generator)
        return {"input_ids": tokens, "labels": tokens}

    return Family(_of_config(name, config, **fields), inputs, _own_loss)


def _sequence_to_sequence(generator: torch.Generator) -> dict[str, Any]:
    return {"input_ids": _tokens(generator), "labels": _tokens(generator)}


def _classified(generator: torch.Generator) -> dict[str, Any]:
    return {"pixel_values": _images(generator), "labels": torch.tensor([0, 1])}


def _clip() -> nn.Module:
    text = {**_SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2}
    vision = {**_SIZES, **_OF_IMAGES}
    return _of_config("CLIPModel", "CLIPConfig", text_config=text, vision_config=vision, projection_dim=16)()


def _pairs(generator: torch.Generator) -> dict[str, Any]:
    return {"input_ids": _tokens(generator), "pixel_values": _images(generator), "return_loss": True}


def _whisper() -> nn.Module:
    layers = {
        f"{part}_{what}": n
        for part in ("encoder", "decoder")
        for what, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))
    }
    places = {"max_source_positions": 10, "max_target_positions": 16, "num_mel_bins": 8}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    fields = {"vocab_size": VOCABULARY, "d_model": 32, "suppress_tokens": None, "begin_suppress_tokens": None}
    return _of_config("WhisperForConditionalGeneration", "WhisperConfig", **layers, **places, **ids, **fields)()


def _spoken(generator: torch.Generator) -> dict[str, Any]:
    return {"input_features": torch.randn(2, 8, 20, generator=generator), "labels": _tokens(generator)}


def _heard(generator: torch.Generator) -> dict[str, Any]:
    return {"input_values": torch.randn(2, 400, generator=generator), "labels": _tokens(generator)[:, :4]}


def _of_timm(name: str, **fields: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name, num_classes=5, **fields)
        return model

    return build


def _of_diffusers(name: str, **fields: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import diffusers

        model: nn.Module = getattr(diffusers, name)(**fields)
        return model

    return build


def _noisy(generator: torch.Generator) -> dict[str, Any]:
    return {"sample": _images(generator), "timestep": torch.tensor([3, 7])}


def _noisy_classes(generator: torch.Generator) -> dict[str, Any]:
    batch = {"hidden_states": _images(generator, 8, 4), "timestep": torch.tensor([3, 7])}
    return {**batch, "class_labels": torch.tensor([0, 1])}


_MAMBA = {"hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, "vocab_size": VOCABULARY, "pad_token_id": 0}
_OPT = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
_UNET = {"sample_size": 16, "block_out_channels": (16, 32), "norm_num_groups": 4, "layers_per_block": 1}
_BLOCKS = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
_DIT = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8, "norm_num_groups": 4}

_XLNET = {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}
_CONVOLUTIONS = {"conv_dim": (16, 16), "conv_stride": (4, 2), "conv_kernel": (8, 4), "num_feat_extract_layers": 2}
_POSITIONS = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0}
_WAVES = {**_CONVOLUTIONS, **_POSITIONS, "vocab_size": VOCABULARY, "pad_token_id": 0}
_LATENT = {"kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
_ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DEEPSEEK = {**_GROUPED, **_LATENT, **_ROUTED, "num_key_value_heads": 4, "first_k_dense_replace": 1} | {
    "n_group": 1,
    "topk_group": 1,
}

FAMILIES = {
    "llama": _decoder("LlamaForCausalLM", "LlamaConfig", **_GROUPED),
    "qwen2": _decoder("Qwen2ForCausalLM", "Qwen2Config", **_GROUPED),
    "qwen3": _decoder("Qwen3ForCausalLM", "Qwen3Config", **_GROUPED, head_dim=8, tie_word_embeddings=True),
    "qwen3_moe": _decoder(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        **_GROUPED,
        **_EXPERTS,
        head_dim=8,
        num_experts=4,
        moe_intermediate_size=24,
    ),
    "mixtral": _decoder("MixtralForCausalLM", "MixtralConfig", **_GROUPED, **_EXPERTS, num_local_experts=4),
    "gemma3": _decoder("Gemma3ForCausalLM", "Gemma3TextConfig", **_GROUPED, head_dim=8, sliding_window=4),
    "gpt2": _decoder(
        "GPT2LMHeadModel", "GPT2Config", n_embd=32, n_layer=2, n_head=4, vocab_size=VOCABULARY, n_positions=32
    ),
    "gpt_neox": _decoder("GPTNeoXForCausalLM", "GPTNeoXConfig", **_SIZES, vocab_size=VOCABULARY),
    "opt": _decoder(
        "OPTForCausalLM", "OPTConfig", **_OPT, vocab_size=VOCABULARY, max_position_embeddings=32, pad_token_id=0
    ),
    "mamba": _decoder("MambaForCausalLM", "MambaConfig", **_MAMBA),
    "bert": _decoder("BertForMaskedLM", "BertConfig", **_SIZES, vocab_size=VOCABULARY),
    "t5": Family(
        _of_config("T5ForConditionalGeneration", "T5Config", **_T5, vocab_size=VOCABULARY),
        _sequence_to_sequence,
        _own_loss,
    ),
    # These three do not name their layers.
    "deberta_v2": _decoder("DebertaV2ForMaskedLM", "DebertaV2Config", **_SIZES, vocab_size=VOCABULARY),
    "xlnet": _decoder("XLNetLMHeadModel", "XLNetConfig", **_XLNET, vocab_size=VOCABULARY),
    "wav2vec2": Family(_of_config("Wav2Vec2ForCTC", "Wav2Vec2Config", **_SIZES, **_WAVES), _heard, _own_loss),
    "deepseek_v3": _decoder("DeepseekV3ForCausalLM", "DeepseekV3Config", **_DEEPSEEK),
    "gpt_oss": _decoder(
        "GptOssForCausalLM", "GptOssConfig", **_GROUPED, **_EXPERTS, num_local_experts=4, head_dim=8, sliding_window=4
    ),
    "vit": Family(_of_config("ViTForImageClassification", "ViTConfig", **_SIZES, **_OF_IMAGES), _classified, _own_loss),
    "clip": Family(_clip, _pairs, _own_loss),
    "whisper": Family(_whisper, _spoken, _own_loss),
    "timm_vit": Family(
        _of_timm("vit_tiny_patch16_224", img_size=32, embed_dim=24, depth=2, num_heads=3),
        lambda generator: {"x": _images(generator, 32)},
        _square,
        units=["Block"],
    ),
    "timm_resnet": Family(
        _of_timm("resnet10t"), lambda generator: {"x": _images(generator, 32)}, _square, units=["BasicBlock"]
    ),
    "unet": Family(
        _of_diffusers("UNet2DModel", **_UNET, **_BLOCKS, attention_head_dim=4),
        _noisy,
        _square,
        units=["DownBlock2D", "AttnDownBlock2D", "UNetMidBlock2D", "AttnUpBlock2D", "UpBlock2D"],
    ),
    "dit": Family(
        _of_diffusers("DiTTransformer2DModel", **_DIT, in_channels=4, num_embeds_ada_norm=10),
        _noisy_classes,
        _square,
        # The model's own forward calls the embedding of its first block once more.
        units=["CombinedTimestepLabelEmbeddings", "BasicTransformerBlock"],
    ),
}
