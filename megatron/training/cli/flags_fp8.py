"""Flags of the layers' implementation and of FP8; names and defaults are Megatron-LM's."""

from __future__ import annotations

from megatron.training.cli.flag_rows import F, FlagGroup

IMPLEMENTATIONS = ("transformer_engine", "local")
KERNELS = ("fastest", "transformer_engine")

FP8_FLAGS = FlagGroup(
    "transformer-engine and FP8",
    F(
        "--transformer-impl",
        "layers of transformer-engine where it is installed, on CUDA devices (default: "
        "transformer_engine; elsewhere the local ones are taken, and a line says so), or the framework's "
        "own (local)",
        choices=IMPLEMENTATIONS,
    ),
    F(
        "--layer-kernels",
        "with --transformer-impl transformer_engine, what does not multiply in FP8: layers that were "
        "measured to be the fastest, which are the framework's own in bf16 (default: fastest), or "
        "transformer-engine's everywhere; numbers differ by rounding",
        default="fastest",
        choices=KERNELS,
    ),
    F(
        "--fp8-format",
        "multiply in FP8: all tensors in E4M3, or gradients of outputs in E5M2 (hybrid); needs transformer-engine",
        dest="fp8_format",
    ),
    F(
        "--fp8-recipe",
        "where scales come from: earlier steps, the tensor, or its blocks (default: delayed; mxfp8 needs "
        "Blackwell and is refused, as is custom)",
        choices=["delayed", "tensorwise", "blockwise", "mxfp8", "custom"],
    ),
    F("--fp8-margin", "with delayed, divide scales by 2 to this power"),
    F("--fp8-amax-history-len", "with delayed, steps whose largest absolute values are kept"),
    F(
        "--fp8-amax-compute-algo",
        "with delayed, the value that scales are made for: the last one, or the largest of all kept",
    ),
    F("--fp8-param-gather", "weights rest and travel in FP8, in addition to their main weights"),
    F(
        "--keep-fp8-transpose-cache",
        "with --fp8-param-gather, keep the transposed bytes that backward needs until the weights change",
    ),
    F(
        "--use-transformer-engine-op-fuser",
        "in FP8, write the MLP's activation in FP8, without a copy in bf16, and with delayed and "
        "tensorwise the gradient of its input too; dense models; needs transformer-engine",
    ),
    F(
        "--activation-func-fp8-input-store",
        "with --use-transformer-engine-op-fuser, keep what the MLP's activation needs in backward in "
        "FP8, half of the most that a layer keeps",
    ),
    F("--fp8-dot-product-attention", "core attention in FP8"),
    F(
        "--fp8-multi-head-attention",
        "with --fp8-dot-product-attention, the attention's output stays in FP8 for the projection behind it",
    ),
    F("--tp-only-amax-red", "with delayed, reduce largest values over tensor- and context-parallel ranks alone"),
    F("--first-last-layers-bf16", "with tensorwise and blockwise, the first and last layers not in FP8"),
    F("--num-layers-at-start-in-bf16", "layers at the start that --first-last-layers-bf16 means"),
    F("--num-layers-at-end-in-bf16", "layers at the end that --first-last-layers-bf16 means"),
)
