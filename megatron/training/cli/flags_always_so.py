"""Flags of Megatron-LM that are accepted because they ask for what always holds here."""

from __future__ import annotations

from megatron.training.cli.flag_parser import AlwaysSo

ALWAYS_SO: dict[str, AlwaysSo] = {
    "--use-mcore-models": AlwaysSo(fact="models have Megatron-Core's structure and parameter names"),
    "--deprecated-use-mcore-models": AlwaysSo(fact="models have Megatron-Core's structure and parameter names"),
    "--use-flash-attn": AlwaysSo(
        fact="attention uses the FlashAttention kernel wherever PyTorch has it for the device"
    ),
    "--megatron-fsdp-version": AlwaysSo(fact="there is one engine, whatever the version", values=("1", "2")),
    "--fsdp-double-buffer": AlwaysSo(fact="gathered weights lie in one arena with fixed addresses"),
    "--fsdp-manual-registration": AlwaysSo(
        fact="with symmetric memory, a buffer is registered once, when it is allocated",
        needs=("--use-megatron-fsdp", "--use-nccl-ub"),
    ),
    "--disable-mamba-mem-eff-path": AlwaysSo(
        fact="what Mamba's layers keep for backward does not depend on it; use --recompute-granularity selective"
    ),
    "--auto-detect-ckpt-format": AlwaysSo(fact="what lies in a folder says its format"),
    "--dist-ckpt-strictness": AlwaysSo(
        fact="missing, extra and mis-shaped keys are errors",
        values=("raise_all",),
    ),
    "--ckpt-fully-parallel-save": AlwaysSo(fact="each rank writes the rows that it owns"),
    "--ckpt-fully-parallel-load": AlwaysSo(fact="each rank reads the rows that it owns"),
    "--dist-ckpt-optim-fully-reshardable": AlwaysSo(fact="optimizer state is loaded under any split"),
    "--load-main-params-from-ckpt": AlwaysSo(fact="checkpoints hold the main weights, and these are loaded"),
    "--trust-remote-code": AlwaysSo(fact="code beside a tokenizer is never run, and none is needed"),
    "--use-gigatoken": AlwaysSo(fact="tokenizers are compiled, and give the same ids"),
    "--no-create-attention-mask-in-dataloader": AlwaysSo(fact="the attention kernel applies the causal mask itself"),
    "--moe-permute-fusion": AlwaysSo(fact="tokens are permuted by one gather, in backward as well"),
    "--moe-router-fusion": AlwaysSo(
        fact="routing after the choice of experts is one compiled function, forward and backward"
    ),
    "--overlap-p2p-communication-warmup-flush": AlwaysSo(
        fact="messages of virtual stages travel beside the computation in all phases of a step"
    ),
    "--no-scatter-gather-tensors-in-pipeline": AlwaysSo(fact="each tensor-parallel rank sends its own tensors"),
    "--no-align-grad-reduce": AlwaysSo(
        fact="each pipeline stage reduces its gradients as soon as its backward has computed them"
    ),
    "--disable-align-grad-reduce": AlwaysSo(
        fact="each pipeline stage reduces its gradients as soon as its backward has computed them"
    ),
    "--no-align-param-gather": AlwaysSo(fact="each pipeline stage gathers weights by its own plan"),
    "--no-barrier-with-level-1-timing": AlwaysSo(fact="timing adds no barrier"),
    "--disable-msc": AlwaysSo(fact="all files are local"),
    "--enable-experimental": AlwaysSo(fact="no feature depends on this switch"),
    "--te-rng-tracker": AlwaysSo(fact="a CUDA graph draws the same random numbers as eager steps"),
    "--rerun-mode": AlwaysSo(fact="no step is run twice", values=("disabled",)),
    "--cpu-offloading-retain-pinned-cpu-buffers": AlwaysSo(fact="page-locked buffers of the host are used again"),
    "--no-one-logger": AlwaysSo(fact="nothing is reported to one_logger"),
}
