"""Flags of attention's variants; names, types and defaults are Megatron-LM's."""

from __future__ import annotations

import argparse

from megatron.training.cli.flags_experts import layer_pattern


def add_attention_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of windows, sinks, norms of queries and keys, layers without rotary positions and output gates."""
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
    group.add_argument("--qk-l2-norm", action="store_true", help="divide queries and keys by their root mean square")
    group.add_argument(
        "--no-rope-freq",
        type=layer_pattern,
        help="every n-th layer has no rotary positions, or a 1 (none) or 0 for each layer (default: all have them)",
    )
    group.add_argument(
        "--attention-output-gate", action="store_true", help="multiply what attention gives by the sigmoid of a gate"
    )


def window(text: str) -> tuple[int, ...]:
    """Parse numbers between commas, in brackets or not.

    Raises:
        argparse.ArgumentTypeError: the text is something else.
    """
    try:
        return tuple(int(number) for number in text.strip("()").split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be two numbers such as 127,0, got {text!r}") from None
