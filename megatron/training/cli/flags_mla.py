"""Flags of multi-latent attention; names, types and defaults are Megatron-LM's unless the help says otherwise."""

from __future__ import annotations

import argparse
from typing import Any

DEFAULTS_OF_MLA: dict[str, Any] = {
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "rotary_scaling_factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
"""Settings that have no effect without ``--multi-latent-attention``."""


def add_mla_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``MLATransformerConfig``."""
    group = parser.add_argument_group("multi-latent attention")
    group.add_argument(
        "--multi-latent-attention", action="store_true", help="queries, keys and values are made from latent vectors"
    )
    group.add_argument(
        "--q-lora-rank",
        type=int,
        default=DEFAULTS_OF_MLA["q_lora_rank"],
        help="width of the latent vector of queries (default: they are projected from the hidden states)",
    )
    for name, what in {
        "kv_lora_rank": "width of the latent vector of keys and values",
        "qk_head_dim": "width of the part of a head's query and key that positions do not turn",
        "qk_pos_emb_head_dim": "width of the part that they turn",
        "v_head_dim": "width of a head's value",
    }.items():
        _add(group, name, what)
    group.add_argument(
        "--rope-type",
        choices=["rope", "yarn"],
        help="rotary frequencies: those of --rotary-base, or YaRN's for longer contexts (default: yarn with "
        "--multi-latent-attention, where alone it is served)",
    )
    for name, what in {
        "rotary_scaling_factor": "YaRN: how many times longer contexts are than in the first training",
        "mscale": "YaRN: factor of the logarithm by which turned channels grow",
        "mscale_all_dim": "YaRN: factor of the logarithm by which scores grow",
        "original_max_position_embeddings": "ours; YaRN: the longest context of the first training",
        "beta_fast": "ours; YaRN: turns within that context from which on a frequency stays",
        "beta_slow": "ours; YaRN: turns within that context up to which a frequency is divided",
    }.items():
        _add(group, name, what)


def _add(group: argparse._ArgumentGroup, name: str, what: str) -> None:
    default = DEFAULTS_OF_MLA[name]
    group.add_argument(
        f"--{name.replace('_', '-')}", type=type(default), default=default, help=f"{what} (default: {default})"
    )


def mla_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields that an ``MLATransformerConfig`` has beside those of a ``TransformerConfig``."""
    return {
        **{name: getattr(args, name) for name in DEFAULTS_OF_MLA},
        "rope_type": args.rope_type or "yarn",
        "rotary_base": args.rotary_base,
        "rotary_percent": args.rotary_percent,
    }
