"""Flags of Megatron-LM that are refused, by name or by prefix, with the reason."""

from __future__ import annotations

_MOE = "this setting of experts is not served"
_FP8 = "this setting of FP8 is not served; use --fp8-format and --fp8-recipe delayed, tensorwise or blockwise"
_FP4 = "FP4 needs Blackwell, and no recipe for it is served; use --fp8-format"
_TP_OVERLAP = "tensor-parallel communication is not overlapped with the matrix products around it"
_DISPATCH = "tokens are dispatched by one all-to-all; use --moe-token-dispatcher-type alltoall"
_DECODER = "only decoder models are served; use --num-layers and --seq-length"
_TOKENIZER = "tokenizers are configured by their file alone; use --tokenizer-type and --tokenizer-model"
_FAULTS = "no fault-tolerance package is served; use --exit-signal-handler, and restart from the checkpoint"
_CONSTANT_MIX = "the blend of training data is constant; use --data-path, or --train-data-path"
_QK_CLIP = "weights of queries and keys are changed by the optimizer alone; use --qk-layernorm, which bounds scores"
_MODEL = "this variant of the model is not served yet"
_PIPELINE = "this setting of pipeline stages is not served"
_GRAPHS = "graphs of parts of a step are not served; --cuda-graph-impl full_iteration captures the whole step"
_CHECKPOINT = "this kind of checkpoint is not served; --save, --save-interval and --load are"
_CHECKS = "this check is not served; non-finite losses and gradients are checked by default"
_PAIRS = "models of sentence pairs and of images are not served; only GPT models are"
_DISTILL = "logits are not saved, and there is no distillation from a teacher's"
_BITWISE = "kernels are not bitwise the same for all batch sizes; --deterministic-mode repeats a run bit by bit"
_RESIDUALS = "there is one residual stream"
_SAVED_VALUES = "intermediate values are not saved; library code can hook any module"
_WEIGHT_SHARDS = "weights are sharded by --use-megatron-fsdp and --expert-tensor-parallel-size"
_DOCUMENT_MASKS = "a sample has --seq-length tokens; use --reset-attention-mask to keep documents apart"
_LAYERS_ALIKE = "all layers with the same place in the pattern are alike"

REFUSED: dict[str, str] = {
    "--main-params-dtype": "use --megatron-fsdp-main-params-dtype",
    "--enable-full-sharding-in-hsdp": "use --outer-dp-sharding-strategy optim, which shards optimizer state over all ranks",
    "--decrease-batch-size-if-needed": "the global batch size does not follow the number of ranks; give one that fits it",
    "--activation-func": "the activation is GELU by default; use --swiglu or --squared-relu for another",
    "--no-fp8-wgrad": "transformer-engine no longer has a setting for weight gradients alone",
    "--disable-fp8-wgrad": "transformer-engine no longer has a setting for weight gradients alone",
    "--fp8-output-proj": "in Megatron-Core it goes with mxfp8 alone, which needs Blackwell",
    "--local-rank": "start ranks with torchrun, which gives it as LOCAL_RANK",
    "--local_rank": "start ranks with torchrun, which gives it as LOCAL_RANK",
    "--openai-gelu": _MODEL,
    "--qk-clip": _QK_CLIP,
    "--mrope-section": _MODEL,
    "--mup-width-mult": "it is --hidden-size divided by --mup-base-hidden-size",
    "--apply-residual-connection-post-layernorm": _MODEL,
    "--init-method-xavier-uniform": "weights are drawn from normal distributions; use --init-method-std",
    "--data-parallel-random-init": "ranks always start with the same weights",
    "--moe-layer-recompute": "use --recompute-granularity full, which recomputes layers with experts as well",
    "--pretrained-checkpoint": _CHECKPOINT,
    "--load-model-opt-format": _CHECKPOINT,
    "--check-for-spiky-loss": _CHECKS,
    "--check-for-large-grads": _CHECKS,
    "--iterations-to-skip": "every iteration is trained; leave the flag out",
    "--variable-seq-lengths": "all samples are of --seq-length tokens",
    "--object-storage-cache-path": "data are read from local files only",
    "--enable-msc": "data and checkpoints are read from local files only",
    "--mid-level-dataset-surplus": _CONSTANT_MIX,
    "--phase-transition-iterations": _CONSTANT_MIX,
    "--decoder-seq-length": _DECODER,
    "--decoder-num-layers": _DECODER,
    "--sample-rate": _DECODER,
    "--mask-prob": _DECODER,
    "--short-seq-prob": _DECODER,
    "--tokenizer-hf-no-use-fast": "tokenizers are read from tokenizer.json, which the slow ones do not have",
    "--tokenizer-sentencepiece-legacy": "it adds tokens that the model does not have; train the model with them",
    "--no-tokenizer-sentencepiece-ignore-extra-whitespaces": "spaces are treated as the model was trained to",
    "--disable-tokenizer-sentencepiece-ignore-extra-whitespaces": "spaces are treated as the model was trained to",
    "--vocab-extra-ids": "models with masked spans are not served",
    "--log-energy": "energy is not measured",
    "--log-max-attention-logit": "logits of attention are not kept",
    "--run-workload-inspector-server": "there is no server beside training",
    "--exit-signal": "use --exit-signal-handler, which saves and ends on SIGTERM",
    "--enable-ft-package": _FAULTS,
    "--calc-ft-timeouts": _FAULTS,
    "--yaml-cfg": "settings are not read from a YAML file; give each as a flag",
    "--dist-ckpt-save-pre-mcore-014": "--ckpt-format torch_dist writes what Megatron-Core reads from 0.14 on; leave the flag out",
    "--batch-invariant-backend": _BITWISE,
    "--batch-invariant-mode": _BITWISE,
    "--cache-mla-latents": "it is for inference, which keeps nothing between tokens",
    "--chat-template": "the template is the tokenizer's own; use --sft-tokenizer-prompt-format",
    "--max-seqlen-per-dp-cp-rank": _DOCUMENT_MASKS,
    "--use-same-sampling-seed-across-dp-ranks": "ranks that share a sequence alone draw the same random numbers",
    "--delay-offload-until-cuda-graph": _GRAPHS,
    "--delta-offload-bytes-across-pp-ranks": "all pipeline ranks offload alike; leave the flag out",
    "--distributed-timeout-seconds-after-init": "one time-out holds throughout; use --distributed-timeout-minutes",
    "--dump-param-to-param-group-map": "rank 0 prints the units and their parameters at the start; leave the flag out",
    "--enable-mhc-connections": _RESIDUALS,
    "--fake-process-group": "a run needs all its ranks; tools/check_launch.py checks a command line without any",
    "--freeze-all-layers": "all weights are trained; library code freezes them by requires_grad",
    "--head-lr-mult": "learning rates differ by --decoupled-lr alone",
    "--heterogeneous-layers-config-path": _LAYERS_ALIKE,
    "--heterogeneous-layers-config-encoded-json": _LAYERS_ALIKE,
    "--kitchen-attention-backend": "Kitchen's kernels are not served; use --attention-backend",
    "--use-kitchen-attention": "Kitchen's kernels are not served; use --attention-backend",
    "--lion-beta1": "optimizers are adam, sgd and muon",
    "--lion-beta2": "optimizers are adam, sgd and muon",
    "--muon-scalar-optimizer": "parameters that are no matrices are AdamW's; leave the flag out",
    "--muon-use-syrk": "products are whole; leave the flag out, which changes results by rounding alone",
    "--otel-enabled": "nothing is reported to a tracing service",
    "--output-logit-dtype": "logits have the model's dtype",
    "--override-ckpt-iteration": "counters go on from the checkpoint's; --finetune starts at 0",
    "--per-dataset-sequences-path": "give the blend with --data-path",
    "--perform-rl-step": "reinforcement learning is not served",
    "--langrl-env-config": "reinforcement learning is not served",
    "--qk-clip-alpha": _QK_CLIP,
    "--qk-clip-threshold": _QK_CLIP,
    "--refit-method": "inference is not served",
    "--save-activations-interval": _SAVED_VALUES,
    "--save-dgrads-interval": _SAVED_VALUES,
    "--save-params-interval": _SAVED_VALUES,
    "--save-tokens-per-expert-interval": _SAVED_VALUES,
    "--save-wgrads-interval": _SAVED_VALUES,
    "--te-precision-config-file": "all layers multiply as --fp8-format and --fp8-recipe say",
    "--tensor-parallel-num-weight-shards": _WEIGHT_SHARDS,
    "--expert-tensor-parallel-num-weight-shards": _WEIGHT_SHARDS,
    "--export-te-mcore-model": "post-training is not served: there is no export of quantized or pruned models",
}

REFUSED_FAMILIES: tuple[tuple[str, str], ...] = (
    ("--fp8-", _FP8),
    ("--fp4-", _FP4),
    ("--moe-", _MOE),
    ("--mtp-standalone", "--pipeline-model-parallel-layout says where layers of multi-token prediction are"),
    ("--mtp-", "gradients of multi-token prediction go through the whole model, from the layers' own hidden states"),
    ("--tp-comm-", _TP_OVERLAP),
    ("--disable-tp-comm-", _TP_OVERLAP),
    ("--adlr-autoresume", "use --exit-signal-handler, which saves and ends on SIGTERM"),
    ("--app-tag-", "nothing is reported to one_logger"),
    ("--dist-ckpt-", _CHECKPOINT),
    ("--encoder-", _DECODER),
    ("--bert-", _DECODER),
    ("--retriever-", _DECODER),
    ("--relative-attention-", _MODEL),
    ("--dsa-", _MODEL),
    ("--ft-", _FAULTS),
    ("--straggler-", "single ranks are not timed"),
    ("--error-injection-", "no step is run twice"),
    ("--tokenizer-", _TOKENIZER),
    ("--ddp-", "there are no buckets: gradients are reduced unit by unit"),
    ("--non-persistent-", _CHECKPOINT),
    ("--ckpt-convert-", _CHECKPOINT),
    ("--replication", _CHECKPOINT),
    ("--pipeline-", _PIPELINE),
    ("--rl-", "reinforcement learning is not served"),
    ("--grpo-", "reinforcement learning is not served"),
    ("--retro-", "retrieval models are not served"),
    ("--vision-", "vision models are not served"),
    ("--mamba-", "this setting of state-space layers is not served; states are in fp32"),
    ("--hybrid-", "layers of a hybrid model are given by --hybrid-layer-pattern"),
    ("--inference-", "inference is not served"),
    ("--inprocess-", "restarts inside a process are not served; resume from the checkpoint"),
    ("--one-logger-", "nothing is reported to one_logger"),
    ("--hierarchical-context-parallel", "a sequence is split over one group of ranks; use --cp-comm-type p2p"),
    ("--gtp-", _WEIGHT_SHARDS),
    ("--mhc-", _RESIDUALS),
    ("--logits-load-", _DISTILL),
    ("--logits-save-", _DISTILL),
    ("--export-", "post-training is not served: neither distillation nor quantized or pruned models"),
    ("--fault-injector-", "faults are not injected; benchmarks and tests of this repository do that by themselves"),
    ("--disable-dsa-", _MODEL),
    ("--no-dsa-", _MODEL),
    ("--gdp-", _MODEL),
    ("--no-tokenizer-", _TOKENIZER),
    ("--disable-tokenizer-", _TOKENIZER),
    ("--no-rl-", "reinforcement learning is not served"),
    ("--no-inference-", "inference is not served"),
    ("--otel-", "nothing is reported to a tracing service"),
    *(
        (flag, "inference is not served")
        for flag in (
            "--decode-only-cuda-graphs",
            "--enable-chunked-prefill",
            "--flash-decode",
            "--max-tokens-to-oom",
            "--mlp-chunks-for-",
            "--nccl-all-reduce-for-prefill",
            "--num-speculative-tokens",
            "--output-bert-embeddings",
            "--use-legacy-static-engine",
            "--onnx-safe",
        )
    ),
    *(
        (flag, _PAIRS)
        for flag in (
            "--biencoder-",
            "--block-data-path",
            "--classes-fraction",
            "--data-per-class-fraction",
            "--dino-",
            "--embedding-path",
            "--evidence-data-path",
            "--ict-",
            "--img-",
            "--indexer-",
            "--iter-per-epoch",
            "--mask-factor",
            "--mask-type",
            "--num-channels",
            "--num-classes",
            "--patch-dim",
            "--query-in-block-prob",
            "--swin-",
            "--titles-data-path",
            "--use-one-sent-docs",
        )
    ),
)
