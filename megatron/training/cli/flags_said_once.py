"""Flags of Megatron-LM that ask for another way to the same results: accepted, and rank 0 says once what is done instead."""

from __future__ import annotations

from megatron.training.cli.flag_parser import by_flag

SAID_ONCE = by_flag("""
--use-persistent-ckpt-worker --async-strategy --async-ckpt-use-cpu-shm --async-ckpt-cpu-priority
    --async-ckpt-io-priority: a thread of each rank writes the files of --async-save
--ckpt-assume-constant-structure --ckpt-pg-tensors-cache-create --ckpt-pg-tensors-cache-path: each save is planned again,
    which takes milliseconds
--ckpt-fully-parallel-load-exchange-algo --ckpt-fully-parallel-load-per-rank-objects
    --ckpt-fully-parallel-load-process-group --distrib-optim-fully-reshardable-mem-efficient: each rank reads the rows
    that it owns, and nothing is sent between ranks
--no-ckpt-fully-parallel-save --ckpt-fully-parallel-save-process-group --dist-ckpt-workers: each rank writes the rows
    that it owns, whatever is asked
--dist-ckpt-strictness --no-strict-fsdp-dtensor-load --disable-strict-fsdp-dtensor-load
    --no-ckpt-load-validate-sharding-integrity --disable-ckpt-load-validate-sharding-integrity: missing, extra and
    mis-shaped keys are errors (raise_all), which is stricter
--ckpt-drop-redundant-extra-state: checkpoints keep the histories and scales of --fp8-recipe delayed, and hold no other
    extra state
--no-save-tokenizer-assets --disable-save-tokenizer-assets: a checkpoint names the tokenizer, and does not copy its
    files
--rerun-mode --error-injection-rate --error-injection-type --result-rejected-tracker-filename: no step is run twice: a
    loss or gradient that is not finite ends the run with the rank's name
--tp-comm-overlap --tp-comm-overlap-cfg --tp-comm-overlap-rs-dgrad --tp-comm-bootstrap-backend --no-tp-comm-bulk-dgrad
    --no-tp-comm-bulk-wgrad --no-tp-comm-overlap-ag --no-tp-comm-overlap-rs --no-tp-comm-split-ag --no-tp-comm-split-rs
    --disable-tp-comm-bulk-dgrad --disable-tp-comm-bulk-wgrad --disable-tp-comm-overlap-ag --disable-tp-comm-overlap-rs
    --disable-tp-comm-split-ag --disable-tp-comm-split-rs --symmetric-ar-type: tensor-parallel communication is not
    overlapped with matrix products; the numbers are the same
--moe-enable-deepep --moe-flex-dispatcher-backend --moe-deepep-num-sms --moe-flex-dispatcher-num-sms
    --moe-hybridep-num-sms --moe-hybridep-num-sms-preprocessing --moe-hybridep-num-blocks-permute
    --moe-hybridep-num-blocks-unpermute --moe-hybridep-pad-uneven-dispatch-inputs --moe-permute-fusion-into-hybridep
    --moe-ncclep-zero-copy --high-priority-a2a-comm-stream: tokens go to their experts by one all-to-all; the numbers
    are the same
--ddp-average-in-collective --ddp-bucket-size --ddp-num-buckets --ddp-pad-buckets-for-high-nccl-busbw
    --no-gradient-reduce-div-fusion --high-priority-stream-groups: there are no buckets: gradients are reduced unit by
    unit, on their own stream
--overlap-param-gather-with-optimizer-step: weights are gathered when the next forward needs them
--megatron-fsdp-enable-fine-grained-param-gather: weights are gathered unit by unit
--fsdp-db-use-persist-buf-on-alloc-fail --megatron-fsdp-max-pool-double-buffer: buffers are planned from the recorded
    order of units, before the second step
--defer-embedding-wgrad-compute --wgrad-deferral-limit: weight gradients are computed in their layer's backward, not
    later; the numbers are the same
--use-ring-exchange-p2p --pipeline-model-parallel-comm-backend: stages communicate by batches of sends and receives
--no-clone-scatter-output-in-embedding --disable-clone-scatter-output-in-embedding: embeddings that are scattered over
    the sequence are computed by a reduce-scatter, with nothing to clone
--use-fused-weighted-squared-relu --fused-residual-rmsnorm --use-te-activation-func --use-grouped-gemm-for-dense-mlp
    --use-grouped-gemm-for-shared-expert --moe-use-legacy-grouped-gemm --moe-use-grouped-tensor
    --flash-attention-version: the layers' own function is used; the numbers are the same up to rounding
--fp16-lm-cross-entropy: the cross entropy is computed in fp32, as in Megatron-Core
--use-torch-optimizer-for-cpu-offload: torch's fused AdamW updates what is on the host, and the engine's kernel what is
    on the device
--disable-bf16-reduced-precision-matmul: how bf16 products are summed is torch's choice
--hierarchical-context-parallel-sizes: a ring over all context-parallel ranks (--cp-comm-type p2p) exchanges keys and
    values
--moe-router-padding-for-fp8 --moe-router-padding-for-quantization --reuse-grad-buf-for-mxfp8-param-ag: padding for FP8
    is the layers' own
--overlap-dispatch-backward-with-experts-wgrad --ep-overlap-early-attn-memory-release: tokens are exchanged during the
    computation of their own microbatch; the numbers are the same
--moe-shared-expert-overlap: shared experts run before the routed ones; the numbers are the same
--mla-down-proj-fusion: the two down-projections of latent attention are two products; the numbers are the same
--no-use-layer-wise-param-layout: parameters lie by rows, layer by layer
--config-logger-dir: the configuration is printed at the start
--log-device-memory-used: the log line has the memory that torch allocated
--test-mode: replicated weights are compared by --check-weight-hash-across-dp-replicas-interval
--moe-per-layer-logging: auxiliary losses are logged as means over layers
--distribute-saved-activations: recomputed layers keep their whole input; --sequence-parallel divides it
--train-sync-interval: the host is never more than one step ahead where losses are checked
--disable-gloo-process-groups --enable-gloo-process-groups: GPU ranks make a gloo group for --async-save alone
--num-dataset-builder-threads --dataloader-fast-cache-load --dataloader-defer-npy-index-mmap: the data's index is built
    once, by one process, and mapped by the others
--flight-recorder-dump-path --flight-recorder-include-stack-trace --flight-recorder-trace-buffer-size
    --no-flight-recorder-dump-on-timeout --no-flight-recorder-extra-dump-on-exec
    --no-flight-recorder-include-only-active --disable-flight-recorder-dump-on-timeout
    --disable-flight-recorder-extra-dump-on-exec --disable-flight-recorder-include-only-active: after a time-out each
    rank says what it waits for; NCCL's recorder is set by its environment variables
--exit-signal-handler-for-dataloader --exit-signal-handler-for-training: loading workers end with their rank on SIGTERM
--app-tag-run-name --app-tag-run-version --one-logger-project --one-logger-run-name --one-logger-async
    --otel-service-name --otel-span-groups: nothing is reported to one_logger or to a tracing service
--lazy-mpu-init: process groups are made at the start
--log-straggler --disable-straggler-on-startup --straggler-ctrlr-port --straggler-minmax-count
    --gpu-sniff-test-interval: ranks are compared and timed as one: no single rank is watched for being slow
--cuda-graph-modules --enable-cuda-graph --external-cuda-graph --optimizer-cuda-graph: layers are not captured one by
    one: they run eagerly, or with --cuda-graph-impl full_iteration as one graph
--export-force-local-attention: core attention is chosen by --attention-backend
""")
