"""Flags of hybrid models, with Mamba-2 layers; names, types and defaults are Megatron-LM's."""

from __future__ import annotations

import argparse

from megatron.core.transformer.hybrid_layers import layers_of_pattern
from megatron.training.cli.flag_rows import F, FlagGroup

SPECS = tuple(
    (f"megatron.core.models.{family}.{family}_layer_specs", f"{family}_stack_spec") for family in ("hybrid", "mamba")
)
"""What ``--spec`` may name: Megatron-LM's launch scripts of hybrid models do."""


HYBRID_FLAGS = FlagGroup(
    "hybrid models",
    F(
        "--hybrid-layer-pattern",
        "a letter for each layer, M (Mamba-2), * (attention), - (MLP) or E (experts), and | between "
        "pipeline stages, as in M-M*-|M-M-M-; it gives --num-layers (default: layers of attention and "
        "MLP)",
    ),
    F("--is-hybrid-model", "initial weights are those of hybrid models, as with a pattern"),
    F("--spec", "must be Megatron-LM's of hybrid models: the pattern says all of it"),
    F("--mamba-state-dim", "width of Mamba's states"),
    F("--mamba-head-dim", "width of its heads"),
    F("--mamba-num-groups", "groups of its heads, which the tensor-parallel ranks divide"),
    F("--mamba-num-heads", "its heads (default: 2 * hidden size / width of a head)"),
)


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
    pattern = getattr(args, "hybrid_layer_pattern", None)  # absent if it is malformed
    if pattern is not None and getattr(args, "num_layers", 0) is None:
        args.num_layers = len(layers_of_pattern(pattern))
