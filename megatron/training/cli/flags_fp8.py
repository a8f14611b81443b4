"""Flags of the layers' implementation and of FP8; names and defaults are Megatron-LM's."""

from __future__ import annotations

import argparse
from argparse import Namespace
from typing import Any

IMPLEMENTATIONS = ("transformer_engine", "local")
KERNELS = ("fastest", "transformer_engine")

_FP8_SETTINGS = (
    "layer_kernels",
    "fp8_recipe",
    "fp8_margin",
    "fp8_amax_history_len",
    "fp8_amax_compute_algo",
    "fp8_dot_product_attention",
    "fp8_multi_head_attention",
    "tp_only_amax_red",
    "use_transformer_engine_op_fuser",
    "activation_func_fp8_input_store",
    "first_last_layers_bf16",
    "num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16",
)


def add_fp8_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--transformer-impl`` and the flags of FP8."""
    group = parser.add_argument_group("transformer-engine and FP8")
    group.add_argument(
        "--transformer-impl",
        choices=IMPLEMENTATIONS,
        default="transformer_engine",
        help="layers of transformer-engine where it is installed, on CUDA devices (default: transformer_engine; elsewhere the "
        "local ones are taken, and a line says so), or the framework's own (local)",
    )
    group.add_argument(
        "--layer-kernels",
        choices=KERNELS,
        default="fastest",
        help="with --transformer-impl transformer_engine, what does not multiply in FP8: layers that were measured to be the fastest, "
        "which are the framework's own in bf16 (default: fastest), or transformer-engine's everywhere; numbers differ by rounding",
    )
    group.add_argument(
        "--fp8-format",
        choices=["e4m3", "hybrid"],
        help="multiply in FP8: all tensors in E4M3, or gradients of outputs in E5M2 (hybrid); needs transformer-engine",
    )
    group.add_argument(
        "--fp8-recipe",
        choices=["delayed", "tensorwise", "blockwise", "mxfp8", "custom"],
        default="delayed",
        help="where scales come from: earlier steps, the tensor, or its blocks (default: delayed; mxfp8 needs Blackwell and is "
        "refused, as is custom)",
    )
    group.add_argument(
        "--fp8-margin", type=int, default=0, help="with delayed, divide scales by 2 to this power (default: 0)"
    )
    group.add_argument(
        "--fp8-amax-history-len",
        type=int,
        default=1,
        help="with delayed, steps whose largest absolute values are kept (default: 1)",
    )
    group.add_argument(
        "--fp8-amax-compute-algo",
        choices=["most_recent", "max"],
        default="most_recent",
        help="with delayed, the value that scales are made for: the last one, or the largest of all kept (default: most_recent)",
    )
    group.add_argument(
        "--fp8-param-gather", action="store_true", help="weights rest and travel in FP8, beside their main weights"
    )
    group.add_argument(
        "--keep-fp8-transpose-cache",
        action="store_true",
        help="with --fp8-param-gather, keep the transposed bytes that backward needs until the weights change",
    )
    group.add_argument(
        "--use-transformer-engine-op-fuser",
        action="store_true",
        help="in FP8, write the MLP's activation in FP8, without a copy in bf16, and with delayed and tensorwise the gradient of "
        "its input too; dense models; needs transformer-engine",
    )
    group.add_argument(
        "--activation-func-fp8-input-store",
        action="store_true",
        help="with --use-transformer-engine-op-fuser, keep what the MLP's activation needs in backward in FP8, half of the most "
        "that a layer keeps",
    )
    group.add_argument("--fp8-dot-product-attention", action="store_true", help="core attention in FP8")
    group.add_argument(
        "--fp8-multi-head-attention",
        action="store_true",
        help="with --fp8-dot-product-attention, the attention's output stays in FP8 for the projection behind it",
    )
    group.add_argument(
        "--tp-only-amax-red",
        action="store_true",
        help="with delayed, reduce largest values over tensor- and context-parallel ranks alone",
    )
    group.add_argument(
        "--first-last-layers-bf16",
        action="store_true",
        help="with tensorwise and blockwise, the first and last layers not in FP8",
    )
    for end in ("start", "end"):
        group.add_argument(
            f"--num-layers-at-{end}-in-bf16",
            type=int,
            default=1,
            help=f"layers at the {end} that --first-last-layers-bf16 means (default: 1)",
        )


def fp8_settings(args: Namespace) -> dict[str, Any]:
    """Map the flags of FP8 to fields of ``TransformerConfig``."""
    return {"fp8": args.fp8_format, "fp8_param": args.fp8_param_gather} | {
        name: getattr(args, name) for name in _FP8_SETTINGS
    }
