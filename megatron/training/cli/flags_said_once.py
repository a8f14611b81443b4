"""Flags of Megatron-LM that ask for another way to the same results: accepted, and rank 0 says once what is done instead."""

from __future__ import annotations

from megatron.training.cli.flag_parser import SaidOnce

_WRITER = "a thread of each rank writes the files of --async-save"
_PLAN = "each save is planned anew, which takes milliseconds"
_READ = "each rank reads the rows that it owns, and nothing is sent between ranks"
_TP_OVERLAP = "tensor-parallel communication is not overlapped with matrix products; the numbers are the same"
_RERUNS = "no step is run twice: a loss or gradient that is not finite ends the run with the rank's name"
_DISPATCH = "tokens go to their experts by one all-to-all; the numbers are the same"
_BUCKETS = "there are no buckets: gradients are reduced unit by unit, on their own stream"
_FLIGHT = "after a time-out each rank says what it waits for; NCCL's recorder is set by its environment variables"
_INDEX = "the data's index is built once, by one process, and mapped by the others"
_SHARED = "shared experts run before the routed ones; the numbers are the same"
_TWIN = "the layers' own function is used; the numbers are the same up to rounding"

SAID_ONCE: dict[str, SaidOnce] = {
    flag: SaidOnce(instead)
    for instead, flags in {
        _WRITER: (
            "--use-persistent-ckpt-worker",
            "--async-strategy",
            "--async-ckpt-use-cpu-shm",
            "--async-ckpt-cpu-priority",
            "--async-ckpt-io-priority",
        ),
        _PLAN: (
            "--ckpt-assume-constant-structure",
            "--ckpt-pg-tensors-cache-create",
            "--ckpt-pg-tensors-cache-path",
        ),
        _READ: (
            "--ckpt-fully-parallel-load-exchange-algo",
            "--ckpt-fully-parallel-load-per-rank-objects",
            "--ckpt-fully-parallel-load-process-group",
            "--distrib-optim-fully-reshardable-mem-efficient",
        ),
        "each rank writes the rows that it owns, whatever is asked": (
            "--no-ckpt-fully-parallel-save",
            "--ckpt-fully-parallel-save-process-group",
            "--dist-ckpt-workers",
        ),
        "missing, extra and mis-shaped keys are errors (raise_all), which is stricter": (
            "--dist-ckpt-strictness",
            "--no-strict-fsdp-dtensor-load",
            "--disable-strict-fsdp-dtensor-load",
            "--no-ckpt-load-validate-sharding-integrity",
            "--disable-ckpt-load-validate-sharding-integrity",
        ),
        "checkpoints keep the histories and scales of --fp8-recipe delayed, and hold no other extra state": (
            "--ckpt-drop-redundant-extra-state",
        ),
        "a checkpoint names the tokenizer, and does not copy its files": (
            "--no-save-tokenizer-assets",
            "--disable-save-tokenizer-assets",
        ),
        _RERUNS: (
            "--rerun-mode",
            "--error-injection-rate",
            "--error-injection-type",
            "--result-rejected-tracker-filename",
        ),
        _TP_OVERLAP: (
            "--tp-comm-overlap",
            "--tp-comm-overlap-cfg",
            "--tp-comm-overlap-rs-dgrad",
            "--tp-comm-bootstrap-backend",
            "--no-tp-comm-bulk-dgrad",
            "--no-tp-comm-bulk-wgrad",
            "--no-tp-comm-overlap-ag",
            "--no-tp-comm-overlap-rs",
            "--no-tp-comm-split-ag",
            "--no-tp-comm-split-rs",
            "--disable-tp-comm-bulk-dgrad",
            "--disable-tp-comm-bulk-wgrad",
            "--disable-tp-comm-overlap-ag",
            "--disable-tp-comm-overlap-rs",
            "--disable-tp-comm-split-ag",
            "--disable-tp-comm-split-rs",
            "--symmetric-ar-type",
        ),
        _DISPATCH: (
            "--moe-enable-deepep",
            "--moe-flex-dispatcher-backend",
            "--moe-deepep-num-sms",
            "--moe-flex-dispatcher-num-sms",
            "--moe-hybridep-num-sms",
            "--moe-hybridep-num-sms-preprocessing",
            "--moe-hybridep-num-blocks-permute",
            "--moe-hybridep-num-blocks-unpermute",
            "--moe-hybridep-pad-uneven-dispatch-inputs",
            "--moe-permute-fusion-into-hybridep",
            "--moe-ncclep-zero-copy",
            "--high-priority-a2a-comm-stream",
        ),
        _BUCKETS: (
            "--ddp-average-in-collective",
            "--ddp-bucket-size",
            "--ddp-num-buckets",
            "--ddp-pad-buckets-for-high-nccl-busbw",
            "--no-gradient-reduce-div-fusion",
            "--high-priority-stream-groups",
        ),
        "weights are gathered when the next forward needs them": ("--overlap-param-gather-with-optimizer-step",),
        "weights are gathered unit by unit": ("--megatron-fsdp-enable-fine-grained-param-gather",),
        "buffers are planned from the recorded order of units, before the second step": (
            "--fsdp-db-use-persist-buf-on-alloc-fail",
            "--megatron-fsdp-max-pool-double-buffer",
        ),
        "weight gradients are computed in their layer's backward, not later; the numbers are the same": (
            "--defer-embedding-wgrad-compute",
            "--wgrad-deferral-limit",
        ),
        "stages communicate by batches of sends and receives": (
            "--use-ring-exchange-p2p",
            "--pipeline-model-parallel-comm-backend",
        ),
        "embeddings that are scattered over the sequence are computed by a reduce-scatter, with nothing to clone": (
            "--no-clone-scatter-output-in-embedding",
            "--disable-clone-scatter-output-in-embedding",
        ),
        _TWIN: (
            "--use-fused-weighted-squared-relu",
            "--fused-residual-rmsnorm",
            "--use-te-activation-func",
            "--use-grouped-gemm-for-dense-mlp",
            "--use-grouped-gemm-for-shared-expert",
            "--moe-use-legacy-grouped-gemm",
            "--moe-use-grouped-tensor",
            "--flash-attention-version",
        ),
        "the cross entropy is computed in fp32, as in Megatron-Core": ("--fp16-lm-cross-entropy",),
        "torch's fused AdamW updates what is on the host, and the engine's kernel what is on the device": (
            "--use-torch-optimizer-for-cpu-offload",
        ),
        "how bf16 products are summed is torch's choice": ("--disable-bf16-reduced-precision-matmul",),
        "a ring over all context-parallel ranks (--cp-comm-type p2p) exchanges keys and values": (
            "--hierarchical-context-parallel-sizes",
        ),
        "padding for FP8 is the layers' own": (
            "--moe-router-padding-for-fp8",
            "--moe-router-padding-for-quantization",
            "--reuse-grad-buf-for-mxfp8-param-ag",
        ),
        "tokens are exchanged beside the computation of their own microbatch; the numbers are the same": (
            "--overlap-dispatch-backward-with-experts-wgrad",
            "--ep-overlap-early-attn-memory-release",
        ),
        _SHARED: ("--moe-shared-expert-overlap",),
        "the two down-projections of latent attention are two products; the numbers are the same": (
            "--mla-down-proj-fusion",
        ),
        "parameters lie by rows, layer by layer": ("--no-use-layer-wise-param-layout",),
        "the configuration is printed at the start": ("--config-logger-dir",),
        "the log line has the memory that torch allocated": ("--log-device-memory-used",),
        "replicated weights are compared by --check-weight-hash-across-dp-replicas-interval": ("--test-mode",),
        "auxiliary losses are logged as means over layers": ("--moe-per-layer-logging",),
        "recomputed layers keep their whole input; --sequence-parallel divides it": ("--distribute-saved-activations",),
        "the host is never more than one step ahead where losses are checked": ("--train-sync-interval",),
        "GPU ranks make a gloo group for --async-save alone": (
            "--disable-gloo-process-groups",
            "--enable-gloo-process-groups",
        ),
        _INDEX: (
            "--num-dataset-builder-threads",
            "--dataloader-fast-cache-load",
            "--dataloader-defer-npy-index-mmap",
        ),
        _FLIGHT: (
            "--flight-recorder-dump-path",
            "--flight-recorder-include-stack-trace",
            "--flight-recorder-trace-buffer-size",
            *(
                f"--{start}-flight-recorder-{what}"
                for start in ("no", "disable")
                for what in ("dump-on-timeout", "extra-dump-on-exec", "include-only-active")
            ),
        ),
        "loading workers end with their rank on SIGTERM": (
            "--exit-signal-handler-for-dataloader",
            "--exit-signal-handler-for-training",
        ),
        "nothing is reported to one_logger or to a tracing service": (
            "--app-tag-run-name",
            "--app-tag-run-version",
            "--one-logger-project",
            "--one-logger-run-name",
            "--one-logger-async",
            "--otel-service-name",
            "--otel-span-groups",
        ),
        "process groups are made at the start": ("--lazy-mpu-init",),
        "ranks are compared and timed as one: no single rank is watched for being slow": (
            "--log-straggler",
            "--disable-straggler-on-startup",
            "--straggler-ctrlr-port",
            "--straggler-minmax-count",
            "--gpu-sniff-test-interval",
        ),
        "layers are not captured one by one: they run eagerly, or with --cuda-graph-impl full_iteration as one graph": (
            "--cuda-graph-modules",
            "--enable-cuda-graph",
            "--external-cuda-graph",
            "--optimizer-cuda-graph",
        ),
        "core attention is chosen by --attention-backend": ("--export-force-local-attention",),
    }.items()
    for flag in flags
}
