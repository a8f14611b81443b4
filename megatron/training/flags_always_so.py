"""Flags of Megatron-LM that name what always holds here."""

from __future__ import annotations

from megatron.training.flag_parser import AlwaysSo

ALWAYS_SO: dict[str, AlwaysSo] = {
    "--use-mcore-models": AlwaysSo(fact="models have Megatron-Core's structure and parameter names"),
    "--transformer-impl": AlwaysSo(
        fact="layers are PyTorch's and the framework's own",
        values=("local",),
        otherwise="layers of transformer-engine are not served yet",
    ),
    "--use-flash-attn": AlwaysSo(
        fact="attention takes the FlashAttention kernel wherever PyTorch has it for the device"
    ),
    "--megatron-fsdp-version": AlwaysSo(
        fact="there is one engine, built on DTensors as version 2 is",
        values=("2",),
        otherwise="there is no version 1 here",
    ),
    "--fsdp-double-buffer": AlwaysSo(fact="gathered weights lie in one arena with fixed addresses"),
    "--fsdp-manual-registration": AlwaysSo(
        fact="with symmetric memory, a buffer is registered once, when it is allocated"
    ),
    "--ckpt-format": AlwaysSo(
        fact="PyTorch DCP directories of DTensors, the default here",
        values=("fsdp_dtensor",),
        otherwise="checkpoints are PyTorch DCP directories of DTensors (fsdp_dtensor); other formats are not served",
    ),
    "--auto-detect-ckpt-format": AlwaysSo(
        fact="there is one format, and a foreign directory is refused when it is loaded"
    ),
    "--dist-ckpt-strictness": AlwaysSo(
        fact="missing, extra and mis-shaped keys are errors",
        values=("raise_all",),
        otherwise="missing, extra and mis-shaped keys are always errors (raise_all)",
    ),
    "--ckpt-fully-parallel-save": AlwaysSo(fact="each rank writes the rows that it owns"),
    "--ckpt-fully-parallel-load": AlwaysSo(fact="each rank reads the rows that it owns"),
    "--dataloader-type": AlwaysSo(
        fact="one pass over the samples, in order",
        values=("single",),
        otherwise="other orders of samples are not served",
    ),
    "--no-create-attention-mask-in-dataloader": AlwaysSo(fact="the causal mask is the attention kernel's own"),
    "--enable-experimental": AlwaysSo(fact="nothing stands behind this switch"),
    "--te-rng-tracker": AlwaysSo(fact="random numbers in a CUDA graph are those of an eager step"),
    "--rerun-mode": AlwaysSo(fact="no step is run twice", values=("disabled",), otherwise="reruns are not served"),
    "--no-one-logger": AlwaysSo(fact="nothing is reported to one_logger"),
}
