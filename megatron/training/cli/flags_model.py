"""Flags of the model, also with latent attention or Mamba-2; names, types and defaults are Megatron-LM's unless the help says otherwise."""

from __future__ import annotations

import argparse

from megatron.core.transformer.hybrid_layers import layers_of_pattern
from megatron.training.cli.flag_rows import F, FlagGroup
from megatron.training.formats.architecture import exact


def number(text: str) -> int | float:
    """Parse a number, an integer where it is whole, as Megatron-LM has some that may be fractions here.

    Raises:
        argparse.ArgumentTypeError: the text is something else.
    """
    try:
        return exact(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a finite number, got {text!r}") from None


def position_embedding_type(args: argparse.Namespace) -> str:
    """Return how positions are encoded, from any of Megatron-LM's flags for it."""
    if args.enable_gpt_oss:
        return "yarn"
    given: str = "rope" if args.use_rotary_position_embeddings else args.position_embedding_type
    return "none" if given == "learned_absolute" and not args.add_position_embedding else given


def ffn_hidden_size(args: argparse.Namespace) -> int | None:
    """Return the width of the MLP; None: 4 * hidden size. A gated MLP, with three matrices, is two thirds as wide."""
    given: int | None = args.ffn_hidden_size
    if given is not None or not args.swiglu:
        return given
    return max(64, int(4 * args.hidden_size * 2 / 3) // 64 * 64)


MTP_FLAGS = FlagGroup(
    "multi-token prediction",
    F("--mtp-num-layers", "layers that each predict a token further on (default: none)"),
    F("--mtp-loss-scaling-factor", "weight of the mean of their losses, which are added to the main loss"),
    F("--mtp-use-repeated-layer", "one layer is applied --mtp-num-layers times, instead of as many layers"),
)


MODEL_FLAGS = FlagGroup(
    "model",
    F("--num-layers", "transformer layers"),
    F("--hidden-size", "width of the residual stream"),
    F(
        "--ffn-hidden-size",
        "width inside the MLP (default: 4 * hidden size; with --swiglu two thirds of it, in multiples of 64)",
    ),
    F("--num-attention-heads", "query heads"),
    F("--kv-channels", "width of a head (default: hidden size / heads)"),
    F("--group-query-attention", "share keys and values between query heads"),
    F("--num-query-groups", "key and value heads"),
    F("--max-position-embeddings", "length of the longest sequence that the model supports"),
    F("--position-embedding-type", "how positions are encoded", choices=["learned_absolute", "rope", "yarn", "none"]),
    F("--use-rotary-position-embeddings", "the older spelling of --position-embedding-type rope"),
    F("--no-position-embedding", "no learned positions: rope if it is asked for, else none"),
    F("--rotary-base", "base of the rotary frequencies, which may be a fraction", type=number),
    F("--rotary-percent", "fraction of a head that is rotated"),
    F("--rotary-interleaved", "rotate neighbouring pairs of a head"),
    F("--use-rope-scaling", "scale rotary frequencies as Llama 3.1 does"),
    F("--rope-scaling-factor", "factor of --use-rope-scaling"),
    F("--rotary-seq-len-interpolation-factor", "divide positions by this factor, which may be a fraction", type=number),
    F(
        "--make-vocab-size-divisible-by",
        "pad the vocabulary to a multiple of this, which the tensor-parallel ranks can divide",
    ),
    F("--padded-vocab-size", "ids of the model, with padding (default: computed)"),
    F("--no-pad-vocab-size --disable-pad-vocab-size", "do not pad the vocabulary"),
    F("--untie-embeddings-and-output-weights", "separate weights of embedding and output layer"),
)


LAYER_FLAGS = FlagGroup(
    "layers of the model",
    F("--swiglu", "gated SiLU instead of GELU"),
    F("--squared-relu", "squared ReLU instead of GELU"),
    F("--geglu", "ours: gated GELU in its tanh form instead of GELU"),
    F("--quick-geglu", "x * sigmoid(1.702 x), gated, instead of GELU"),
    F("--glu-linear-offset", "added to what a gate multiplies"),
    F(
        "--activation-func-clamp-value",
        "bound of gates from above, and of what they multiply on both sides (default: none)",
    ),
    F("--normalization", "norm of the layers"),
    F(
        "--sandwich-layernorm",
        "ours: norms behind attention and MLP, before their outputs are added to the residual stream",
    ),
    F("--norm-epsilon", "epsilon of the norms (default: 1e-5)", dest="norm_epsilon"),
    F("--apply-layernorm-1p", "store norm weights as weight - 1", dest="apply_layernorm_1p"),
    F("--qk-layernorm", "normalise queries and keys per head, or the latent vectors"),
    F("--disable-bias-linear", "linear layers have no bias"),
    F("--add-qkv-bias", "a bias in the query-key-value layer, even with --disable-bias-linear"),
    F("--attention-dropout", "dropout of attention probabilities"),
    F("--hidden-dropout", "dropout of sublayer outputs"),
    F("--init-method-std", "standard deviation of initial weights"),
    F(
        "--embedding-init-method-std",
        "standard deviation of embeddings' initial weights, which have no weight decay then (default: as "
        "other weights)",
    ),
    F("--embedding-scale", "ours: factor on embeddings, as in Gemma (default: none)", type=float),
    F("--use-cpu-initialization", "draw initial weights on the CPU", default=False),
    F("--no-initialization", "do not write random initial weights, for a model that is loaded"),
)


MUP_FLAGS = FlagGroup(
    "maximal update parametrisation",
    F("--use-mup", "initial weights, attention, logits and rates of hidden matrices scale with the width"),
    F("--mup-base-hidden-size", "width at which rates were found (default: --hidden-size)"),
    F("--mup-embedding-mult", "factor on embeddings"),
    F("--mup-output-mult", "factor on logits (default: base width / width)"),
    F("--mup-base-head-dim", "head width with the usual scale (default: 1)"),
    F("--mup-attn-scale-power", "divide scores by the head width to this power"),
)


NUMERICS_FLAGS = FlagGroup(
    "numerics of the model",
    F("--bf16", "compute in bfloat16 (default: fp32)"),
    F("--fp32-residual-connection", "residual stream in fp32"),
    F(
        "--attention-backend",
        "kernels of attention: torch's choice (auto), on CUDA flash or cuDNN (fused) alone, or all "
        "scores in memory (unfused, local)",
    ),
    F("--attention-softmax-in-fp32", "softmax of unfused attention in fp32"),
    F("--apply-query-key-layer-scaling", "divide scores by the layer's number"),
    F("--no-bias-gelu-fusion", "exact GELU, not fused with the bias (default: fused, GELU in its tanh form)"),
    F("--no-bias-swiglu-fusion", "do not fuse bias and SwiGLU"),
    F("--no-bias-dropout-fusion", "do not fuse bias, dropout and residual sum"),
    F("--no-masked-softmax-fusion", "do not fuse mask and softmax"),
    F("--no-rope-fusion", "do not fuse rotary embedding and the split of queries, keys and values"),
    F(
        "--no-persist-layer-norm",
        "PyTorch's norm kernels, with separate residual sums",
        dest="persist_layer_norm",
        default=True,
        const=False,
    ),
    F("--cross-entropy-loss-fusion", "fused cross entropy, whose gradient overwrites the logits"),
    F(
        "--cross-entropy-fusion-impl",
        "implementation of the fused cross entropy (default: native, as which te is taken)",
    ),
    F("--disable-jit-fuser", "run fused functions as plain PyTorch, not compiled"),
    F(
        "--no-gradient-accumulation-fusion",
        "linear layers leave weight gradients to autograd instead of writing them into the reduce-scatter input",
    ),
    F(
        "--gradient-accumulation-fusion-min-numel",
        "linear layers whose weight has fewer elements leave its gradient to autograd, too (default: "
        "25165824 on a device, 0 on a CPU); layers of transformer-engine have no such bound",
        type=int,
    ),
    F("--deterministic-mode", "use only deterministic kernels"),
    F("--recompute-granularity", "recompute activations in backward"),
    F(
        "--recompute-activations",
        "the same as --recompute-granularity selective",
        dest="recompute_granularity",
        default=None,
        const="selective",
    ),
    F("--recompute-method", "layers that full recomputes: all in chunks (uniform), or the first ones (block)"),
    F("--recompute-num-layers", "layers of a chunk (uniform), or number of recomputed layers (block)"),
    F(
        "--recompute-modules",
        "what selective recomputes: core_attn, mla_up_proj, mlp_act (the MLP's activation; in FP8 with "
        "--use-transformer-engine-op-fuser alone), mlp, moe, or several of them (default: core_attn)",
        nargs="*",
    ),
)


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
