"""Flags of attention's variants; names, types and defaults are Megatron-LM's."""

from __future__ import annotations

import argparse
from typing import Any

from megatron.training.cli.flag_rows import F, FlagGroup
from megatron.training.cli.flags_experts import layer_pattern
from megatron.training.cli.flags_model import position_embedding_type

_OF_YARN = ("yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow")
_FACTOR_OF_GPT_OSS = 32.0
YARN = (*_OF_YARN, "yarn_correction_range_round_to_int")
"""Flags without effect unless positions are YaRN's."""


def window(text: str) -> tuple[int, ...]:
    """Parse numbers between commas, in brackets or not.

    Raises:
        argparse.ArgumentTypeError: the text is something else.
    """
    try:
        return tuple(int(number) for number in text.strip("()").split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be two numbers such as 127,0, got {text!r}") from None


ATTENTION_FLAGS = FlagGroup(
    "variants of attention",
    F(
        "--window-size",
        "positions before a query that it sees, and 0, as in 127,0: 128 with its own (default: all)",
        type=window,
    ),
    F(
        "--window-attn-skip-freq",
        "every n-th layer has no window, or a 1 (window) or 0 for each layer, as in ([1]*5+[0])*4 "
        "(default: all have it)",
        type=layer_pattern,
    ),
    F(
        "--softmax-type",
        "scores in addition to those of keys, whose probability is left out: none, 0 or one that each head "
        "learns (default: vanilla, none)",
    ),
    F(
        "--window-rotary-base",
        "ours: base of rotary frequencies where a layer has a window (default: the same)",
        type=float,
    ),
    F("--softmax-scale", "ours: factor on query-key products (default: 1 / sqrt(width of a head))", type=float),
    F("--qk-l2-norm", "divide queries and keys by their root mean square"),
    F(
        "--no-rope-freq",
        "every n-th layer has no rotary positions, or a 1 (none) or 0 for each layer (default: all have them)",
        type=layer_pattern,
    ),
    F("--attention-output-gate", "multiply what attention gives by the sigmoid of a gate"),
    F("--yarn-original-max-position-embeddings", "YaRN: the longest context of the first training (default: 4096)"),
    F("--yarn-beta-fast", "YaRN: turns within that context from which on a frequency stays (default: 32.0)"),
    F(
        "--yarn-beta-slow",
        "YaRN: turns within that context up to which a frequency is divided by --rotary-scaling-factor (default: 1.0)",
    ),
    F(
        "--yarn-correction-range-round-to-int",
        "YaRN: the bounds between which frequencies are blended are whole channels (default: they are)",
    ),
    F("--no-yarn-correction-range-round-to-int", "YaRN: these bounds are not rounded", default=None, const=False),
    F(
        "--enable-gpt-oss",
        "positions are YaRN's with the values of gpt-oss: contexts 32 times longer than 4,096, and "
        "bounds that are not rounded, where no flag gives another",
    ),
)


LINEAR_ATTENTION_FLAGS = FlagGroup(
    "linear attention",
    F(
        "--experimental-attention-variant",
        "attention of the layers of --linear-attention-freq: gated delta net, by either name (default: "
        "none have another)",
        choices=["gdn", "gated_delta_net"],
    ),
    F(
        "--linear-attention-freq",
        "all but every n-th layer have linear attention, or a 1 (linear) or 0 for each layer, as in ([1]*3+[0])*4",
        type=layer_pattern,
    ),
    F("--linear-conv-kernel-dim", "tokens that its convolution sees"),
    F("--linear-key-head-dim", "width of its query and key heads"),
    F("--linear-value-head-dim", "width of its value heads"),
    F("--linear-num-key-heads", "its query heads, and as many key heads"),
    F("--linear-num-value-heads", "its value heads, a multiple of the key heads"),
)


def yarn_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of ``TransformerConfig`` for YaRN; {} where positions are others."""
    if position_embedding_type(args) != "yarn" or args.multi_latent_attention:
        return {}
    given = {name: getattr(args, name) for name in _OF_YARN}
    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    factor, rounds = args.rotary_scaling_factor, args.yarn_correction_range_round_to_int
    if args.enable_gpt_oss and factor == 1.0:
        factor = _FACTOR_OF_GPT_OSS
    return {
        **settings,
        "yarn_rotary_scaling_factor": factor,
        "yarn_mscale": args.mscale,
        "yarn_mscale_all_dim": args.mscale_all_dim,
        "yarn_correction_range_round_to_int": not args.enable_gpt_oss if rounds is None else rounds,
    }
