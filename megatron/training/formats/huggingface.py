"""Folders of Hugging Face models: ``config.json`` and safetensors files.

Each family of models has a table of names, and a function for each direction between its ``config.json`` and our settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.distributed.fsdp.checkpoint import TensorReader, ViewReader
from megatron.core.distributed.fsdp.huggingface import open_folder, read_json
from megatron.training.formats import huggingface_deepseek as deepseek
from megatron.training.formats import huggingface_gemma3 as gemma3
from megatron.training.formats import huggingface_gpt_oss as gpt_oss
from megatron.training.formats import huggingface_qwen3_next as qwen3_next
from megatron.training.formats.architecture import Architecture, comparable, layers_with_experts, tensor_sizes
from megatron.training.formats.foreign import ForeignCheckpoint
from megatron.training.formats.huggingface_config import CONFIG, TOKEN_IDS, checked_config
from megatron.training.formats.huggingface_llama import (
    DENSE,
    LAYER,
    OUTSIDE,
    ROUTER,
    THERE,
    attention,
    llama_config,
    llama_settings,
    mlp,
    require,
    window_config,
)
from megatron.training.formats.interleaved import ApartReader, Suffixes
from megatron.training.formats.rules import (
    Table,
    check_stored,
    same,
    transposed,
    transposed_queries_keys_values,
    views_of,
    vocabulary,
)
from megatron.training.formats.value_kinds import ARCHITECTURE, InvalidValue, checked

# Buffers that older versions saved, which models compute.
_COMPUTED = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


@dataclass(frozen=True)
class Family:
    """Models of one kind.

    Args:
        model_type: its name in ``config.json``.
        class_name: that of the model's class there.
        settings: our settings of a ``config.json``; raises NotImplementedError for what is not served.
        config: the ``config.json`` of our settings, which may say less than they do.
        table: where our tensors lie there.
        unused: whether a tensor of a file is of no part that is served, by ``config.json`` and its name.
        may_be_dense: whether a family with experts has models without any.
        interleaved: see ``interleaved.py``; the table has such tensors' halves.
    """

    model_type: str
    class_name: str
    settings: Callable[[Mapping[str, Any]], dict[str, Any]]
    config: Callable[[Architecture], dict[str, Any]]
    table: Table
    may_be_dense: bool = False
    unused: Callable[[Mapping[str, Any], str], bool] | None = None
    interleaved: Suffixes = ()

    def may_have(self, *, experts: bool) -> bool:
        """Return whether models with experts, or without any, are among it."""
        return (ROUTER in self.table) == experts or (self.may_be_dense and not experts)


def _head_norms() -> dict[str, Any]:
    return {
        LAYER + f"self_attention.{letter}_layernorm.weight": same(THERE + f"self_attn.{letter}_norm.weight")
        for letter in "qk"
    }


_EXPERT = "mlp.experts.{expert}."
_LLAMA: Table = {**OUTSIDE, **attention(("weight",)), **DENSE}
_QWEN2: Table = {**OUTSIDE, **attention(("weight", "bias")), **DENSE}
_QWEN3: Table = {**_LLAMA, **_head_norms()}
_MIXTRAL: Table = {
    **OUTSIDE,
    **attention(("weight",)),
    ROUTER: same(THERE + "block_sparse_moe.gate.weight"),
    **mlp(
        "mlp.experts.local_experts.{expert}.",
        *(f"block_sparse_moe.experts.{{expert}}.{name}.weight" for name in ("w1", "w3", "w2")),
    ),
}
_QWEN3_MOE: Table = {
    **_QWEN3,
    ROUTER: same(THERE + "mlp.gate.weight"),
    **mlp(
        "mlp.experts.local_experts.{expert}.",
        *(_EXPERT + f"{name}_proj.weight" for name in ("gate", "up", "down")),
    ),
}


def _gpt2_table() -> Table:
    there = "transformer.h.{layer}."
    rules: dict[str, Any] = {
        "embedding.word_embeddings.weight": vocabulary("transformer.wte.weight"),
        "embedding.position_embeddings.weight": same("transformer.wpe.weight"),
    }
    for kind in ("weight", "bias"):
        linear = transposed if kind == "weight" else same
        rules[f"decoder.final_layernorm.{kind}"] = same(f"transformer.ln_f.{kind}")
        rules[LAYER + f"input_layernorm.{kind}"] = same(there + f"ln_1.{kind}")
        rules[LAYER + f"pre_mlp_layernorm.{kind}"] = same(there + f"ln_2.{kind}")
        rules[LAYER + f"self_attention.linear_qkv.{kind}"] = transposed_queries_keys_values(
            there + f"attn.c_attn.{kind}"
        )
        rules[LAYER + f"self_attention.linear_proj.{kind}"] = linear(there + f"attn.c_proj.{kind}")
        rules[LAYER + f"mlp.linear_fc1.{kind}"] = linear(there + f"mlp.c_fc.{kind}")
        rules[LAYER + f"mlp.linear_fc2.{kind}"] = linear(there + f"mlp.c_proj.{kind}")
    return rules


def _experts(config: Mapping[str, Any], num_experts: int, width: int) -> dict[str, Any]:
    dense = set(config.get("mlp_only_layers") or ())
    step = config.get("decoder_sparse_step") or 1
    return {
        "num_moe_experts": num_experts,
        "moe_layer_freq": [
            int(layer not in dense and (layer + 1) % step == 0) for layer in range(config["num_hidden_layers"])
        ],
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": None,
        "moe_shared_expert_gate": False,
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": not config.get("norm_topk_prob", True),
        "moe_router_topk_scaling_factor": None,
    }


def _mixtral_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    experts = _experts(config, config["num_local_experts"], config["intermediate_size"])
    return llama_settings(config) | experts


def _qwen3_moe_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    num_experts = config.get("num_experts") or config["num_local_experts"]
    # Here what is not said means that the chosen probabilities do not sum to one.
    stated = {"norm_topk_prob": False, **config}
    return (
        llama_settings(config) | {"qk_layernorm": True} | _experts(stated, num_experts, config["moe_intermediate_size"])
    )


def _gpt2_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    require(
        config,
        activation_function=("gelu_new", "gelu_pytorch_tanh"),
        scale_attn_by_inverse_layer_idx=(False, None),
        scale_attn_weights=(True, None),
        tie_word_embeddings=(True, None),
        add_cross_attention=(False, None),
    )
    width, heads = config["n_embd"], config["n_head"]
    return {
        "num_layers": config["n_layer"],
        "hidden_size": width,
        "ffn_hidden_size": config.get("n_inner") or 4 * width,
        "num_attention_heads": heads,
        "num_query_groups": heads,
        "kv_channels": width // heads,
        "gated_linear_unit": False,
        "normalization": "LayerNorm",
        "layernorm_epsilon": config["layer_norm_epsilon"],
        "layernorm_zero_centered_gamma": False,
        "add_bias_linear": True,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "rotary_interleaved": False,
        "activation_func": "gelu",
        "max_position_embeddings": config["n_positions"],
        "position_embedding_type": "learned_absolute",
        "rotary_base": 10000,
        "rotary_percent": 1.0,
        "rope_scaling": False,
        "rope_scaling_factor": 8.0,
        "rotary_seq_len_interpolation_factor": None,
        "share_embeddings_and_output_weights": True,
        "padded_vocab_size": config["vocab_size"],
    }


def _qwen2_config(settings: Architecture) -> dict[str, Any]:
    config = llama_config(settings)
    del config["attention_bias"]  # always so
    return {**config, **_some_windows(settings)}


def _some_windows(settings: Architecture) -> dict[str, Any]:
    windows = window_config(settings)
    kinds, sliding = windows["layer_types"], "sliding_attention"
    first = kinds.index(sliding) if sliding in kinds else len(kinds)
    return {**windows, "use_sliding_window": sliding in kinds, "max_window_layers": first}


def _mixtral_config(settings: Architecture) -> dict[str, Any]:
    config = llama_config(settings)
    return {
        **config,
        "intermediate_size": settings.get("moe_ffn_hidden_size") or settings["ffn_hidden_size"],
        "num_local_experts": settings.get("num_moe_experts"),
        "num_experts_per_tok": settings.get("moe_router_topk"),
        "sliding_window": window_config(settings)["sliding_window"],
    }


def _qwen3_config(settings: Architecture) -> dict[str, Any]:
    return {**llama_config(settings), **_some_windows(settings)}


def _qwen3_moe_config(settings: Architecture) -> dict[str, Any]:
    has_experts = layers_with_experts(settings)
    return {
        **_qwen3_config(settings),
        "moe_intermediate_size": settings.get("moe_ffn_hidden_size") or settings["ffn_hidden_size"],
        "num_experts": settings.get("num_moe_experts"),
        "num_experts_per_tok": settings.get("moe_router_topk"),
        "norm_topk_prob": not settings.get("moe_router_pre_softmax"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, has in enumerate(has_experts) if not has],
    }


def _gpt2_config(settings: Architecture) -> dict[str, Any]:
    return {
        "vocab_size": settings["padded_vocab_size"],
        "n_positions": settings["max_position_embeddings"],
        "n_embd": settings["hidden_size"],
        "n_layer": settings["num_layers"],
        "n_head": settings["num_attention_heads"],
        "n_inner": settings["ffn_hidden_size"],
        "activation_function": "gelu_new",
        "layer_norm_epsilon": settings["layernorm_epsilon"],
        "tie_word_embeddings": True,
    }


FAMILIES = (
    Family("llama", "LlamaForCausalLM", llama_settings, llama_config, _LLAMA),
    Family("qwen2", "Qwen2ForCausalLM", lambda c: llama_settings(c) | {"add_qkv_bias": True}, _qwen2_config, _QWEN2),
    Family("qwen3", "Qwen3ForCausalLM", lambda c: llama_settings(c) | {"qk_layernorm": True}, _qwen3_config, _QWEN3),
    Family("mixtral", "MixtralForCausalLM", _mixtral_settings, _mixtral_config, _MIXTRAL),
    Family("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3_moe_settings, _qwen3_moe_config, _QWEN3_MOE),
    Family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        deepseek.settings,
        deepseek.config,
        deepseek.TABLE,
        may_be_dense=True,
        unused=deepseek.is_of_later_tokens,
    ),
    Family(
        "gpt_oss",
        "GptOssForCausalLM",
        gpt_oss.settings,
        gpt_oss.config,
        gpt_oss.TABLE,
        interleaved=gpt_oss.INTERLEAVED,
    ),
    Family("qwen3_next", "Qwen3NextForCausalLM", qwen3_next.settings, qwen3_next.config, qwen3_next.TABLE),
    Family("gemma3_text", "Gemma3ForCausalLM", gemma3.settings, gemma3.config, gemma3.TABLE),
    Family("gpt2", "GPT2LMHeadModel", _gpt2_settings, _gpt2_config, _gpt2_table()),
)
_NOT_SERVED = {
    "deepseek_v2": "it has multi-latent attention, but scores and groups of experts are others than DeepSeek-V3's",
}


def family_of(config: Mapping[str, Any], path: Path) -> Family:
    """Return the family of a ``config.json``.

    Raises:
        NotImplementedError: it is not served; says why.
    """
    name = config.get("model_type")
    family = next((family for family in FAMILIES if family.model_type == name), None)
    if family is None:
        why = _NOT_SERVED.get(str(name), "its layers are not known here")
        served = ", ".join(family.model_type for family in FAMILIES)
        raise NotImplementedError(f"{path}: model_type must be one of {served}, got {name!r}: {why}")
    return family


def settings_of(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return our settings of the model of a ``config.json``.

    Raises:
        NotImplementedError: a part of the model is not served.
        ValueError: a setting is missing, of another type or out of range.
    """
    family = family_of(config, path)
    try:
        return checked(family.settings(checked_config(config, path)), ARCHITECTURE, path)
    except NotImplementedError as error:
        raise NotImplementedError(f"{path}: {error}") from error
    except InvalidValue:
        raise
    except KeyError as error:
        raise ValueError(f"{path} must describe a {family.model_type} model, got no {error.args[0]}") from error
    except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise ValueError(f"{path} must describe a {family.model_type} model, got {error!r}") from error


def family_for(settings: Architecture) -> tuple[Family, dict[str, Any]]:
    """Return the family whose models compute what ours of these settings do, and the ``config.json``.

    Raises:
        NotImplementedError: there is none; says what keeps each from it.
    """
    wanted = comparable(settings)
    reasons = []
    has_experts = settings.get("num_moe_experts") is not None
    for family in (family for family in FAMILIES if family.may_have(experts=has_experts)):
        try:
            config = family.config(settings)
            found = comparable(family.settings(config))
        except NotImplementedError as error:
            reasons.append(f"{family.model_type}: {error}")
            continue
        other = [name for name in {**wanted, **found} if wanted.get(name) != found.get(name)]
        if not other:
            return family, {"architectures": [family.class_name], "model_type": family.model_type, **config}
        reasons.append(f"{family.model_type}: {', '.join(f'{name} {wanted.get(name)}' for name in other[:4])}")
    raise NotImplementedError(
        f"the model must be one of a Hugging Face family, got settings that none has ({'; '.join(reasons)})"
    )


def open_huggingface(folder: Path, *, verify: bool = True) -> ForeignCheckpoint:
    """Open the folder of a Hugging Face model.

    Args:
        verify: compare what is read with its checksums, where there are any.

    Raises:
        NotImplementedError: the model, or a part of it, is not served.
        ValueError: a file is not what it must be.
        FileNotFoundError: a file is missing.
    """
    path = folder / CONFIG
    config = read_json(path)
    family, settings = family_of(config, path), settings_of(config, path)
    config = checked_config(config, path)
    opened = open_folder(folder, verify=verify, others=[CONFIG])
    stored: TensorReader = ApartReader(opened, family.interleaved) if family.interleaved else opened

    def views(architecture: Architecture, state_keys: Sequence[str] | None) -> ViewReader:
        found = views_of(
            family.table, tensor_sizes(architecture), architecture, vocab_rows=settings["padded_vocab_size"]
        )
        tied = architecture["share_embeddings_and_output_weights"]
        check_stored(
            found,
            stored.entries,
            folder,
            unused=lambda name: (
                name.endswith(_COMPUTED)
                or (tied and name == "lm_head.weight")
                or (family.unused is not None and family.unused(config, name))
            ),
        )
        return ViewReader(stored, found)

    return ForeignCheckpoint(
        path=folder,
        kind=f"Hugging Face, {family.model_type}",
        architecture=settings,
        views=views,
        vocab_rows=settings["padded_vocab_size"],
        num_ids=settings["padded_vocab_size"],
        token_ids={name: config[name] for name in TOKEN_IDS if config.get(name) is not None},
    )
