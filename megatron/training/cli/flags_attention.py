"""Flags of attention's variants; names, types and defaults are Megatron-LM's."""

from __future__ import annotations

import argparse
from typing import Any

from megatron.training.cli.flags_experts import layer_pattern
from megatron.training.cli.flags_model import position_embedding_type


def add_attention_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of windows, sinks, norms of queries and keys, layers without rotary positions, gates and linear attention."""
    group = parser.add_argument_group("variants of attention")
    group.add_argument(
        "--window-size",
        type=window,
        help="positions before a query that it sees, and 0, as in 127,0: 128 with its own (default: all)",
    )
    group.add_argument(
        "--window-attn-skip-freq",
        type=layer_pattern,
        help="every n-th layer has no window, or a 1 (window) or 0 for each layer, as in ([1]*5+[0])*4 (default: all have it)",
    )
    group.add_argument(
        "--softmax-type",
        choices=["vanilla", "off-by-one", "learnable"],
        default="vanilla",
        help="scores beside those of keys, whose probability is left out: none, 0 or one that each head learns "
        "(default: vanilla, none)",
    )
    group.add_argument(
        "--window-rotary-base",
        type=float,
        help="ours: base of rotary frequencies where a layer has a window (default: the same)",
    )
    group.add_argument(
        "--softmax-scale", type=float, help="ours: factor on query-key products (default: 1 / sqrt(width of a head))"
    )
    group.add_argument("--qk-l2-norm", action="store_true", help="divide queries and keys by their root mean square")
    group.add_argument(
        "--no-rope-freq",
        type=layer_pattern,
        help="every n-th layer has no rotary positions, or a 1 (none) or 0 for each layer (default: all have them)",
    )
    group.add_argument(
        "--attention-output-gate", action="store_true", help="multiply what attention gives by the sigmoid of a gate"
    )
    _add_yarn_flags(group)
    _add_linear_attention_flags(parser.add_argument_group("linear attention"))


def _add_linear_attention_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--experimental-attention-variant",
        choices=["gdn", "gated_delta_net"],
        help="attention of the layers of --linear-attention-freq: gated delta net, by either name (default: none have another)",
    )
    group.add_argument(
        "--linear-attention-freq",
        type=layer_pattern,
        help="all but every n-th layer have linear attention, or a 1 (linear) or 0 for each layer, as in ([1]*3+[0])*4",
    )
    for name, default, what in (
        ("conv-kernel-dim", 4, "tokens that its convolution sees"),
        ("key-head-dim", 128, "width of its query and key heads"),
        ("value-head-dim", 128, "width of its value heads"),
        ("num-key-heads", 16, "its query heads, and as many key heads"),
        ("num-value-heads", 32, "its value heads, a multiple of the key heads"),
    ):
        group.add_argument(f"--linear-{name}", type=int, default=default, help=f"{what} (default: {default})")


_OF_YARN: dict[str, tuple[type, float]] = {
    "yarn_original_max_position_embeddings": (int, 4096),
    "yarn_beta_fast": (float, 32.0),
    "yarn_beta_slow": (float, 1.0),
}
_FACTOR_OF_GPT_OSS = 32.0
YARN: dict[str, Any] = {
    **dict.fromkeys(_OF_YARN),
    "yarn_correction_range_round_to_int": None,
}
"""Flags without effect unless positions are YaRN's, with their defaults."""


def _add_yarn_flags(group: argparse._ArgumentGroup) -> None:
    for (name, (kind, default)), what in zip(
        _OF_YARN.items(),
        (
            "the longest context of the first training",
            "turns within that context from which on a frequency stays",
            "turns within that context up to which a frequency is divided by --rotary-scaling-factor",
        ),
        strict=True,
    ):
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, help=f"YaRN: {what} (default: {default})")
    group.add_argument(
        "--yarn-correction-range-round-to-int",
        action="store_true",
        default=None,
        help="YaRN: the bounds between which frequencies are blended are whole channels (default: they are)",
    )
    group.add_argument(
        "--no-yarn-correction-range-round-to-int",
        dest="yarn_correction_range_round_to_int",
        action="store_false",
        default=None,
        help="YaRN: these bounds are not rounded",
    )
    group.add_argument(
        "--enable-gpt-oss",
        action="store_true",
        help="positions are YaRN's with the values of gpt-oss: contexts 32 times longer than 4,096, and bounds that are not "
        "rounded, where no flag gives another",
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


def window(text: str) -> tuple[int, ...]:
    """Parse numbers between commas, in brackets or not.

    Raises:
        argparse.ArgumentTypeError: the text is something else.
    """
    try:
        return tuple(int(number) for number in text.strip("()").split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be two numbers such as 127,0, got {text!r}") from None
