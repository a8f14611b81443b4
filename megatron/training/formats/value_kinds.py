"""Kinds of values that a file may have under a name: a closed list, each with its type and range.

A file of somebody else's settings decides what a model is, and nothing beyond that. So a reader takes the names that it knows,
and only values of their kinds; other names do not get through.
"""

from __future__ import annotations

import math
import reprlib
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

from megatron.core.activations import ACTIVATIONS
from megatron.core.distributed.fsdp.checkpoint import CheckpointReader, StoredValue

MAX_LAYERS = 1 << 14
MAX_WIDTH = 1 << 26
MAX_SIZE = (1 << 31) - 1
"""Of vocabularies and contexts."""
_MAX_TEXT = 4096


class InvalidValue(ValueError):
    """Values of a file are of other kinds than they must be; the message has a line for each."""


@dataclass(frozen=True)
class Kind:
    """What a value must be: ``words`` for messages, and whether a value ``holds``."""

    words: str
    holds: Callable[[Any], bool]

    def __or__(self, other: Kind) -> Kind:
        return Kind(f"{self.words} or {other.words}", lambda value: self.holds(value) or other.holds(value))


def whole(least: int, most: int) -> Kind:
    """Return the kind of whole numbers in a range; true and false are none."""
    return Kind(f"a whole number from {least} to {most}", lambda value: type(value) is int and least <= value <= most)


_MAX_NUMBER = 1e30


def number(*, above: float = -math.inf, least: float = -math.inf, most: float = math.inf) -> Kind:
    """Return the kind of finite numbers in a range, fractions among them."""
    bounds = [f"above {above:g}"] * (above > -math.inf) + [f"from {least:g} on"] * (least > -math.inf)
    bounds += [f"at most {most:g}"] * (most < math.inf)

    def holds(value: Any) -> bool:
        if type(value) not in (int, float) or abs(value) > _MAX_NUMBER:  # NaN passes this comparison
            return False
        return math.isfinite(value) and value > above and least <= value <= most

    return Kind(" ".join(("a finite number", " and ".join(bounds))).strip(), holds)


def one_of(*texts: str) -> Kind:
    """Return the kind of these texts."""
    return Kind(f"one of {', '.join(texts)}", lambda value: isinstance(value, str) and value in texts)


def several(kind: Kind, *, most: int) -> Kind:
    """Return the kind of lists whose elements are of a kind."""
    words = f"a list, with at most {most} elements, each {kind.words}"
    return Kind(words, lambda value: isinstance(value, list) and len(value) <= most and all(map(kind.holds, value)))


FLAG = Kind("true or false", lambda value: type(value) is bool)
NULL = Kind("null", lambda value: value is None)
ANY = Kind("any", lambda value: True)
"""For entries that are only compared with values that are served."""

TEXT = Kind(
    f"a text of 1 to {_MAX_TEXT} printable characters that does not begin with a dash",
    lambda value: (
        isinstance(value, str)
        and 0 < len(value) <= _MAX_TEXT
        and value.isprintable()
        and unicodedata.category(value[0]) != "Pd"
    ),
)
PATTERN = whole(0, MAX_LAYERS) | several(whole(0, 1), most=MAX_LAYERS)
"""Every n-th layer, or a 1 or 0 for each."""

PATTERN_TEXT = Kind(
    f"a text of at most {MAX_LAYERS} capital letters and *-|/+",
    lambda value: isinstance(value, str) and len(value) <= MAX_LAYERS and not set(value) - {*ascii_uppercase, *"*-|/+"},
)
"""The layers of a hybrid model, with Megatron-LM's borders of stages and of multi-token prediction."""


def checked(values: Mapping[str, Any], kinds: Mapping[str, Kind], where: object) -> dict[str, Any]:
    """Return the values that have a kind, and leave out others.

    Args:
        where: the file, for messages.

    Raises:
        InvalidValue: values are of other kinds; a line for each names the file and the key.
    """
    faults = [
        f"{where}: {name} must be {kind.words}, got {reprlib.repr(values[name])}; it is not used: correct the file, or load another"
        for name, kind in kinds.items()
        if name in values and not kind.holds(values[name])
    ]
    if faults:
        raise InvalidValue("\n".join(faults))
    return {name: value for name, value in values.items() if name in kinds}


def checked_entry(stored: CheckpointReader, name: str, kinds: Mapping[str, Kind]) -> dict[str, Any]:
    """Return the values that a dict of a checkpoint has under ``name``, as ``checked``; {} where there is none.

    Raises:
        InvalidValue: it is no dict, or values in it are of other kinds; names the file.
    """
    entry = stored.entries.get(name)
    if not isinstance(entry, StoredValue):
        return {}
    found, where = stored.values([name])[name], stored.folder / entry.place.file
    if not isinstance(found, dict):
        raise InvalidValue(f"{where}: {name} must be a dict, got {reprlib.repr(found)}; load another checkpoint")
    return checked(found, kinds, where)


_WIDTH, _WIDTH_OR_NULL = whole(1, MAX_WIDTH), whole(0, MAX_WIDTH) | NULL
_SIZE, _POSITIVE, _FINITE = whole(1, MAX_SIZE), number(above=0), number()

ARCHITECTURE: Mapping[str, Kind] = {
    **dict.fromkeys(
        ("hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"), _WIDTH
    ),
    "num_layers": whole(1, MAX_LAYERS),
    "padded_vocab_size": _SIZE,
    "max_position_embeddings": _SIZE,
    "normalization": one_of("LayerNorm", "RMSNorm"),
    "layernorm_epsilon": number(above=0, most=1),
    "activation_func": one_of(*ACTIVATIONS),
    "position_embedding_type": one_of("learned_absolute", "rope", "yarn", "none"),
    "rotary_base": _POSITIVE,
    "rotary_percent": number(least=0, most=1),
    "rotary_seq_len_interpolation_factor": _POSITIVE | NULL,
    "rope_scaling_factor": _POSITIVE,
    **dict.fromkeys(
        (
            "gated_linear_unit",
            "layernorm_zero_centered_gamma",
            "add_bias_linear",
            "add_qkv_bias",
            "qk_layernorm",
            "qk_l2_norm",
            "rotary_interleaved",
            "rope_scaling",
            "share_embeddings_and_output_weights",
            "attention_output_gate",
            "sandwich_layernorm",
            "multi_latent_attention",
            "mtp_use_repeated_layer",
            "moe_shared_expert_gate",
            "moe_router_pre_softmax",
            "moe_apply_probs_on_input",
            "moe_router_enable_expert_bias",
            "yarn_correction_range_round_to_int",
        ),
        FLAG,
    ),
    # Variants of layers.
    "window_size": several(whole(-1, MAX_SIZE), most=2) | NULL,
    **dict.fromkeys(("window_attn_skip_freq", "no_rope_freq", "linear_attention_freq"), PATTERN | NULL),
    "moe_layer_freq": PATTERN,
    "softmax_type": one_of("vanilla", "off-by-one", "learnable"),
    "experimental_attention_variant": one_of("gdn", "gated_delta_net") | NULL,
    "glu_linear_offset": _FINITE,
    **dict.fromkeys(("activation_func_clamp_value", "embedding_scale", "softmax_scale"), _FINITE | NULL),
    **dict.fromkeys(("mup_embedding_mult", "mup_output_mult"), _FINITE),
    "window_rotary_base": _POSITIVE | NULL,
    "hybrid_layer_pattern": PATTERN_TEXT,
    # Widths of further parts.
    **dict.fromkeys(
        (
            "linear_conv_kernel_dim",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "linear_num_key_heads",
            "linear_num_value_heads",
            "mamba_state_dim",
            "mamba_head_dim",
            "mamba_num_groups",
            "kv_lora_rank",
            "qk_head_dim",
            "qk_pos_emb_head_dim",
            "v_head_dim",
        ),
        _WIDTH,
    ),
    **dict.fromkeys(("mamba_num_heads", "q_lora_rank", "moe_ffn_hidden_size", "moe_latent_size"), _WIDTH_OR_NULL),
    "mtp_num_layers": whole(0, MAX_LAYERS) | NULL,
    # Experts.
    "num_moe_experts": whole(1, MAX_LAYERS) | NULL,
    "moe_shared_expert_intermediate_size": _WIDTH_OR_NULL,
    "moe_router_topk": whole(1, MAX_LAYERS),
    "moe_router_score_function": one_of("softmax", "sigmoid", "sqrtsoftplus"),
    "moe_router_topk_scaling_factor": _FINITE | NULL,
    **dict.fromkeys(("moe_router_num_groups", "moe_router_group_topk"), whole(0, MAX_LAYERS) | NULL),
    # YaRN, with latent attention and without.
    "rope_type": one_of("rope", "yarn"),
    **dict.fromkeys(("original_max_position_embeddings", "yarn_original_max_position_embeddings"), _SIZE),
    **dict.fromkeys(
        (
            "rotary_scaling_factor",
            "yarn_rotary_scaling_factor",
            "beta_fast",
            "beta_slow",
            "yarn_beta_fast",
            "yarn_beta_slow",
        ),
        _POSITIVE,
    ),
    **dict.fromkeys(("mscale", "mscale_all_dim"), _FINITE),
    **dict.fromkeys(("yarn_mscale", "yarn_mscale_all_dim"), _FINITE | NULL),
}
"""The settings of a model that a checkpoint may give, by our names; see ``GPTConfig.architecture``."""
