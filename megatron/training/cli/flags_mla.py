"""Flags of multi-latent attention; names, types and defaults are Megatron-LM's unless the help says otherwise."""

from __future__ import annotations

from megatron.training.cli.flag_rows import F, FlagGroup

MLA_FLAGS = FlagGroup(
    "multi-latent attention",
    F("--multi-latent-attention", "queries, keys and values are made from latent vectors"),
    F("--q-lora-rank", "width of the latent vector of queries (default: they are projected from the hidden states)"),
    F("--kv-lora-rank", "width of the latent vector of keys and values"),
    F("--qk-head-dim", "width of the part of a head's query and key that positions do not turn"),
    F("--qk-pos-emb-head-dim", "width of the part that they turn"),
    F("--v-head-dim", "width of a head's value"),
    F(
        "--rope-type",
        "rotary frequencies: those of --rotary-base, or YaRN's for longer contexts (default: yarn with "
        "--multi-latent-attention, where alone it is served)",
    ),
    F("--rotary-scaling-factor", "YaRN: how many times longer contexts are than in the first training"),
    F("--mscale", "YaRN: factor of the logarithm by which turned channels grow"),
    F("--mscale-all-dim", "YaRN: factor of the logarithm by which scores grow"),
    F(
        "--original-max-position-embeddings",
        "ours; YaRN: the longest context of the first training",
        type=int,
        default=4096,
    ),
    F("--beta-fast", "ours; YaRN: turns within that context from which on a frequency stays", type=float, default=32.0),
    F(
        "--beta-slow",
        "ours; YaRN: turns within that context up to which a frequency is divided",
        type=float,
        default=1.0,
    ),
)
