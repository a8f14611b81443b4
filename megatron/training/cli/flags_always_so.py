"""Flags of Megatron-LM that name what always holds here."""

from __future__ import annotations

from megatron.training.cli.flag_parser import AlwaysSo

ALWAYS_SO: dict[str, AlwaysSo] = {
    "--use-mcore-models": AlwaysSo(fact="models have Megatron-Core's structure and parameter names"),
    "--deprecated-use-mcore-models": AlwaysSo(fact="models have Megatron-Core's structure and parameter names"),
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
    "--dist-ckpt-optim-fully-reshardable": AlwaysSo(fact="optimizer state is loaded under any split"),
    "--no-use-tokenizer-model-from-checkpoint-args": AlwaysSo(fact="the command line names the tokenizer"),
    "--dataloader-type": AlwaysSo(
        fact="one pass over the samples, in order",
        values=("single",),
        otherwise="other orders of samples are not served",
    ),
    "--no-create-attention-mask-in-dataloader": AlwaysSo(fact="the causal mask is the attention kernel's own"),
    "--moe-permute-fusion": AlwaysSo(fact="tokens reach the order of experts by one gather, whose gradient is one too"),
    "--moe-router-fusion": AlwaysSo(fact="what follows a router's choice of experts is one compiled function each way"),
    "--no-overlap-p2p-communication": AlwaysSo(fact="stages are not interleaved: there are no chunks to overlap with"),
    "--no-scatter-gather-tensors-in-pipeline": AlwaysSo(fact="each tensor-parallel rank sends what it holds"),
    "--no-align-grad-reduce": AlwaysSo(fact="each pipeline stage reduces gradients when its own backward has them"),
    "--no-align-param-gather": AlwaysSo(fact="each pipeline stage gathers weights by its own plan"),
    "--timing-log-level": AlwaysSo(
        fact="iterations are timed as a whole", values=("0",), otherwise="iterations are timed as a whole (0), no parts"
    ),
    "--no-barrier-with-level-1-timing": AlwaysSo(fact="no barrier is there for the sake of timing"),
    "--disable-msc": AlwaysSo(fact="files are local ones"),
    "--enable-experimental": AlwaysSo(fact="nothing stands behind this switch"),
    "--te-rng-tracker": AlwaysSo(fact="random numbers in a CUDA graph are those of an eager step"),
    "--rerun-mode": AlwaysSo(fact="no step is run twice", values=("disabled",), otherwise="reruns are not served"),
    "--no-one-logger": AlwaysSo(fact="nothing is reported to one_logger"),
}
