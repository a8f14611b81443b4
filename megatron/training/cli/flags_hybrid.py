"""Flags of hybrid models, with Mamba-2 layers; names, types and defaults are Megatron-LM's."""

from __future__ import annotations

import argparse

from megatron.core.transformer.hybrid_layers import MAMBA_SIZES, layers_of_pattern

SPECS = tuple(
    (f"megatron.core.models.{family}.{family}_layer_specs", f"{family}_stack_spec") for family in ("hybrid", "mamba")
)
"""What ``--spec`` may name: Megatron-LM's launch scripts of hybrid models do."""


def add_hybrid_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of layer patterns and of Mamba-2."""
    group = parser.add_argument_group("hybrid models")
    group.add_argument(
        "--hybrid-layer-pattern",
        help="a letter for each layer, M (Mamba-2), * (attention), - (MLP) or E (experts), and | between pipeline stages, as in "
        "M-M*-|M-M-M-; it gives --num-layers (default: layers of attention and MLP)",
    )
    group.add_argument(
        "--is-hybrid-model", action="store_true", help="initial weights are those of hybrid models, as with a pattern"
    )
    group.add_argument("--spec", nargs="*", help="must be Megatron-LM's of hybrid models: the pattern says all of it")
    for name, what in (
        ("mamba_state_dim", "width of Mamba's states"),
        ("mamba_head_dim", "width of its heads"),
        ("mamba_num_groups", "groups of its heads, which the tensor-parallel ranks divide"),
        ("mamba_num_heads", "its heads"),
    ):
        default = MAMBA_SIZES[name]
        shown = "2 * hidden size / width of a head" if default is None else default
        group.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=f"{what} (default: {shown})")


def has_states(args: argparse.Namespace) -> bool:
    """Return whether layers carry states through the sequence."""
    return args.experimental_attention_variant is not None or args.hybrid_layer_pattern is not None


def check_spec(args: argparse.Namespace) -> None:
    """Refuse another ``--spec`` than that of hybrid models.

    Raises:
        ValueError: it is another, or there is no pattern.
    """
    if args.spec is not None and (args.hybrid_layer_pattern is None or tuple(args.spec) not in SPECS):
        raise ValueError(
            f"--spec must be Megatron-LM's of hybrid models, with --hybrid-layer-pattern, got {' '.join(args.spec)}: flags choose"
            " the layers; library code gives GPTModel a spec of its own"
        )


def take_num_layers(args: argparse.Namespace) -> None:
    """Set ``--num-layers``, where it is left out, to the number of layers of ``--hybrid-layer-pattern``."""
    if args.hybrid_layer_pattern is not None and getattr(args, "num_layers", 0) is None:
        args.num_layers = len(layers_of_pattern(args.hybrid_layer_pattern))
