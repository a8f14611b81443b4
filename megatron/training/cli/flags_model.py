"""Flags of the model; names, types and defaults are Megatron-LM's."""

from __future__ import annotations

import argparse

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


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``GPTConfig`` and ``TransformerConfig``, except those of experts and parallelism."""
    _add_shape_flags(parser.add_argument_group("model"))
    _add_block_flags(parser.add_argument_group("layers of the model"))
    _add_mtp_flags(parser.add_argument_group("multi-token prediction"))
    _add_mup_flags(parser.add_argument_group("maximal update parametrisation"))
    _add_numerics_flags(parser.add_argument_group("numerics of the model"))


def _add_mtp_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--mtp-num-layers", type=int, help="layers that each predict a token further on (default: none)")
    group.add_argument(
        "--mtp-loss-scaling-factor",
        type=float,
        default=0.1,
        help="weight of the mean of their losses beside the main loss (default: 0.1)",
    )
    group.add_argument(
        "--mtp-use-repeated-layer",
        action="store_true",
        help="one layer is applied --mtp-num-layers times, instead of as many layers",
    )


def _add_shape_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--num-layers", type=int, help="transformer layers")
    group.add_argument("--hidden-size", type=int, help="width of the residual stream")
    group.add_argument(
        "--ffn-hidden-size",
        type=int,
        help="width inside the MLP (default: 4 * hidden size; with --swiglu two thirds of it, in multiples of 64)",
    )
    group.add_argument("--num-attention-heads", type=int, help="query heads")
    group.add_argument("--kv-channels", type=int, help="width of a head (default: hidden size / heads)")
    group.add_argument("--group-query-attention", action="store_true", help="share keys and values between query heads")
    group.add_argument("--num-query-groups", type=int, default=1, help="key and value heads (default: 1)")
    group.add_argument(
        "--max-position-embeddings", type=int, help="length of the longest sequence that the model supports"
    )
    group.add_argument(
        "--position-embedding-type",
        choices=["learned_absolute", "rope", "yarn", "none"],
        default="learned_absolute",
        help="how positions are encoded (default: learned_absolute)",
    )
    group.add_argument(
        "--use-rotary-position-embeddings",
        action="store_true",
        help="the older spelling of --position-embedding-type rope",
    )
    group.add_argument(
        "--no-position-embedding",
        dest="add_position_embedding",
        action="store_false",
        help="no learned positions: rope if it is asked for, else none",
    )
    group.add_argument(
        "--rotary-base",
        type=number,
        default=10000,
        help="base of the rotary frequencies, which may be a fraction (default: 10000)",
    )
    group.add_argument(
        "--rotary-percent", type=float, default=1.0, help="fraction of a head that is rotated (default: 1.0)"
    )
    group.add_argument("--rotary-interleaved", action="store_true", help="rotate neighbouring pairs of a head")
    group.add_argument("--use-rope-scaling", action="store_true", help="scale rotary frequencies as Llama 3.1 does")
    group.add_argument(
        "--rope-scaling-factor", type=float, default=8.0, help="factor of --use-rope-scaling (default: 8.0)"
    )
    group.add_argument(
        "--rotary-seq-len-interpolation-factor",
        type=number,
        help="divide positions by this factor, which may be a fraction",
    )
    group.add_argument(
        "--make-vocab-size-divisible-by",
        type=int,
        default=128,
        help="pad the vocabulary to a multiple of this, which the tensor-parallel ranks can divide (default: 128)",
    )
    group.add_argument("--padded-vocab-size", type=int, help="ids of the model, with padding (default: computed)")
    group.add_argument(
        "--no-pad-vocab-size",
        "--disable-pad-vocab-size",
        dest="pad_vocab_size",
        action="store_false",
        help="do not pad the vocabulary",
    )
    group.add_argument(
        "--untie-embeddings-and-output-weights",
        action="store_true",
        help="separate weights of embedding and output layer",
    )


def _add_block_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--swiglu", action="store_true", help="gated SiLU instead of GELU")
    group.add_argument("--squared-relu", action="store_true", help="squared ReLU instead of GELU")
    group.add_argument("--geglu", action="store_true", help="ours: gated GELU in its tanh form instead of GELU")
    group.add_argument("--quick-geglu", action="store_true", help="x * sigmoid(1.702 x), gated, instead of GELU")
    group.add_argument(
        "--glu-linear-offset", type=float, default=0.0, help="added to what a gate multiplies (default: 0.0)"
    )
    group.add_argument(
        "--activation-func-clamp-value",
        type=float,
        help="bound of gates from above, and of what they multiply on both sides (default: none)",
    )
    group.add_argument(
        "--normalization", choices=["LayerNorm", "RMSNorm"], default="LayerNorm", help="norm of the layers"
    )
    group.add_argument(
        "--sandwich-layernorm",
        action="store_true",
        help="ours: norms behind attention and MLP, before their outputs are added to the residual stream",
    )
    group.add_argument("--norm-epsilon", type=float, default=1e-5, help="epsilon of the norms (default: 1e-5)")
    group.add_argument("--apply-layernorm-1p", action="store_true", help="store norm weights as weight - 1")
    group.add_argument(
        "--qk-layernorm", action="store_true", help="normalise queries and keys per head, or the latent vectors"
    )
    group.add_argument(
        "--disable-bias-linear", dest="add_bias_linear", action="store_false", help="linear layers have no bias"
    )
    group.add_argument(
        "--add-qkv-bias",
        action="store_true",
        help="a bias in the query-key-value layer, even with --disable-bias-linear",
    )
    group.add_argument(
        "--attention-dropout", type=float, default=0.1, help="dropout of attention probabilities (default: 0.1)"
    )
    group.add_argument("--hidden-dropout", type=float, default=0.1, help="dropout of sublayer outputs (default: 0.1)")
    group.add_argument(
        "--init-method-std", type=float, default=0.02, help="standard deviation of initial weights (default: 0.02)"
    )
    group.add_argument(
        "--embedding-init-method-std",
        type=float,
        help="standard deviation of embeddings' initial weights, which have no weight decay then (default: as other weights)",
    )
    group.add_argument("--embedding-scale", type=float, help="ours: factor on embeddings, as in Gemma (default: none)")
    group.add_argument("--use-cpu-initialization", action="store_true", help="draw initial weights on the CPU")
    group.add_argument(
        "--no-initialization",
        dest="perform_initialization",
        action="store_false",
        help="do not write random initial weights, for a model that is loaded",
    )


def _add_mup_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--use-mup",
        action="store_true",
        help="initial weights, attention, logits and rates of hidden matrices scale with the width",
    )
    group.add_argument(
        "--mup-base-hidden-size", type=int, help="width at which rates were found (default: --hidden-size)"
    )
    group.add_argument("--mup-embedding-mult", type=float, default=1.0, help="factor on embeddings (default: 1.0)")
    group.add_argument(
        "--mup-output-mult", type=float, default=1.0, help="factor on logits (default: base width / width)"
    )
    group.add_argument("--mup-base-head-dim", type=float, help="head width with the usual scale (default: 1)")
    group.add_argument(
        "--mup-attn-scale-power",
        type=float,
        default=1.0,
        help="divide scores by the head width to this power (default: 1.0)",
    )


def _add_numerics_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--bf16", action="store_true", help="compute in bfloat16 (default: fp32)")
    group.add_argument("--fp32-residual-connection", action="store_true", help="residual stream in fp32")
    group.add_argument(
        "--attention-backend",
        choices=["flash", "fused", "unfused", "local", "auto"],
        default="auto",
        help="kernels of attention: torch's choice (auto), on CUDA flash or cuDNN (fused) alone, or all scores in memory "
        "(unfused, local)",
    )
    group.add_argument("--attention-softmax-in-fp32", action="store_true", help="softmax of unfused attention in fp32")
    group.add_argument(
        "--apply-query-key-layer-scaling", action="store_true", help="divide scores by the layer's number"
    )
    group.add_argument(
        "--no-bias-gelu-fusion",
        dest="bias_gelu_fusion",
        action="store_false",
        help="exact GELU, not fused with the bias (default: fused, GELU in its tanh form)",
    )
    for fused, parts in {
        "bias_swiglu": "bias and SwiGLU",
        "bias_dropout": "bias, dropout and residual sum",
        "masked_softmax": "mask and softmax",
        "rope": "rotary embedding and the split of queries, keys and values",
    }.items():
        group.add_argument(
            f"--no-{fused.replace('_', '-')}-fusion",
            dest=f"{'apply_' if fused == 'rope' else ''}{fused}_fusion",
            action="store_false",
            help=f"do not fuse {parts}",
        )
    group.add_argument(
        "--no-persist-layer-norm",
        dest="persist_layer_norm",
        action="store_false",
        help="PyTorch's norm kernels, with separate residual sums",
    )
    group.add_argument(
        "--cross-entropy-loss-fusion",
        action="store_true",
        help="fused cross entropy, whose gradient overwrites the logits",
    )
    group.add_argument(
        "--cross-entropy-fusion-impl",
        choices=["native", "te"],
        default="native",
        help="implementation of the fused cross entropy (default: native, as which te is taken)",
    )
    group.add_argument(
        "--disable-jit-fuser", action="store_true", help="run fused functions as plain PyTorch, not compiled"
    )
    group.add_argument(
        "--no-gradient-accumulation-fusion",
        dest="gradient_accumulation_fusion",
        action="store_false",
        help="linear layers leave weight gradients to autograd instead of writing them into the reduce-scatter input",
    )
    group.add_argument(
        "--gradient-accumulation-fusion-min-numel",
        type=int,
        help="linear layers whose weight has fewer elements leave its gradient to autograd, too (default: 25165824 on a device, "
        "0 on a CPU); layers of transformer-engine have no such bound",
    )
    group.add_argument("--deterministic-mode", action="store_true", help="use only deterministic kernels")
    group.add_argument(
        "--recompute-granularity", choices=["full", "selective"], help="recompute activations in backward"
    )
    group.add_argument(
        "--recompute-activations",
        dest="recompute_granularity",
        action="store_const",
        const="selective",
        help="the same as --recompute-granularity selective",
    )
    group.add_argument(
        "--recompute-method",
        choices=["uniform", "block"],
        help="layers that full recomputes: all in chunks (uniform), or the first ones (block)",
    )
    group.add_argument(
        "--recompute-num-layers", type=int, help="layers of a chunk (uniform), or number of recomputed layers (block)"
    )
    group.add_argument(
        "--recompute-modules",
        nargs="*",
        help="what selective recomputes: core_attn, mla_up_proj, mlp_act (the MLP's activation; in FP8 with "
        "--use-transformer-engine-op-fuser alone), mlp, moe, or several of them (default: core_attn)",
    )
