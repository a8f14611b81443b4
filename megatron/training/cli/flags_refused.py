"""Flags of Megatron-LM that are refused, with the reason."""

from __future__ import annotations

from megatron.training.cli.flag_parser import by_flag

REFUSED = by_flag("""
--main-params-dtype: use --megatron-fsdp-main-params-dtype
--enable-full-sharding-in-hsdp: use --outer-dp-sharding-strategy optim, which shards optimizer state over all ranks
--decrease-batch-size-if-needed: the global batch size does not follow the number of ranks; give one that fits it
--activation-func: the activation is GELU by default; use --swiglu or --squared-relu for another
--no-fp8-wgrad --disable-fp8-wgrad: transformer-engine no longer has a setting for weight gradients alone
--fp8-output-proj: in Megatron-Core it goes with mxfp8 alone, which needs Blackwell
--local-rank --local_rank: start ranks with torchrun, which gives it as LOCAL_RANK
--openai-gelu --mrope-section --apply-residual-connection-post-layernorm --relative-attention-* --dsa-* --disable-dsa-*
    --no-dsa-* --gdp-*: this variant of the model is not served yet
--qk-clip --qk-clip-alpha --qk-clip-threshold: weights of queries and keys are changed by the optimizer alone; use
    --qk-layernorm, which bounds scores
--mup-width-mult: it is --hidden-size divided by --mup-base-hidden-size
--init-method-xavier-uniform: weights are drawn from normal distributions; use --init-method-std
--data-parallel-random-init: ranks always start with the same weights
--moe-layer-recompute: use --recompute-granularity full, which recomputes layers with experts as well
--pretrained-checkpoint --load-model-opt-format --dist-ckpt-* --non-persistent-* --ckpt-convert-* --replication*: this
    kind of checkpoint is not served; --save, --save-interval and --load are
--check-for-spiky-loss --check-for-large-grads: this check is not served; non-finite losses and gradients are checked by
    default
--iterations-to-skip: every iteration is trained; leave the flag out
--variable-seq-lengths: all samples are of --seq-length tokens
--object-storage-cache-path: data are read from local files only
--enable-msc: data and checkpoints are read from local files only
--mid-level-dataset-surplus --phase-transition-iterations: the blend of training data is constant; use --data-path, or
    --train-data-path
--decoder-seq-length --decoder-num-layers --sample-rate --mask-prob --short-seq-prob --encoder-* --bert-* --retriever-*:
    only decoder models are served; use --num-layers and --seq-length
--tokenizer-hf-no-use-fast: tokenizers are read from tokenizer.json, which the slow ones do not have
--tokenizer-sentencepiece-legacy: it adds tokens that the model does not have; train the model with them
--no-tokenizer-sentencepiece-ignore-extra-whitespaces --disable-tokenizer-sentencepiece-ignore-extra-whitespaces: spaces
    are treated as the model was trained to
--vocab-extra-ids: models with masked spans are not served
--log-energy: energy is not measured
--log-max-attention-logit: logits of attention are not kept
--run-workload-inspector-server: there is no server during training
--exit-signal --adlr-autoresume*: use --exit-signal-handler, which saves and ends on SIGTERM
--enable-ft-package --calc-ft-timeouts --ft-*: no fault-tolerance package is served; use --exit-signal-handler, and
    restart from the checkpoint
--yaml-cfg: settings are not read from a YAML file; give each as a flag
--dist-ckpt-save-pre-mcore-014: --ckpt-format torch_dist writes what Megatron-Core reads from 0.14 on; leave the flag
    out
--batch-invariant-backend --batch-invariant-mode: kernels are not bitwise the same for all batch sizes;
    --deterministic-mode repeats a run bit by bit
--cache-mla-latents: it is for inference, which keeps nothing between tokens
--chat-template: the template is the tokenizer's own; use --sft-tokenizer-prompt-format
--max-seqlen-per-dp-cp-rank: a sample has --seq-length tokens; use --reset-attention-mask to keep documents apart
--use-same-sampling-seed-across-dp-ranks: ranks that share a sequence alone draw the same random numbers
--delay-offload-until-cuda-graph: graphs of parts of a step are not served; --cuda-graph-impl full_iteration captures
    the whole step
--delta-offload-bytes-across-pp-ranks: all pipeline ranks offload the same; leave the flag out
--distributed-timeout-seconds-after-init: one time-out holds throughout; use --distributed-timeout-minutes
--dump-param-to-param-group-map: rank 0 prints the units and their parameters at the start; leave the flag out
--enable-mhc-connections --mhc-*: there is one residual stream
--fake-process-group: a run needs all its ranks; tools/check_launch.py checks a command line without any
--freeze-all-layers: all weights are trained; library code freezes them by requires_grad
--head-lr-mult: learning rates differ by --decoupled-lr alone
--heterogeneous-layers-config-path --heterogeneous-layers-config-encoded-json: all layers with the same place in the
    pattern are the same
--kitchen-attention-backend --use-kitchen-attention: Kitchen's kernels are not served; use --attention-backend
--lion-beta1 --lion-beta2: optimizers are adam, sgd and muon
--muon-scalar-optimizer: parameters that are no matrices are AdamW's; leave the flag out
--muon-use-syrk: products are whole; leave the flag out, which changes results by rounding alone
--otel-enabled --otel-*: nothing is reported to a tracing service
--output-logit-dtype: logits have the model's dtype
--override-ckpt-iteration: counters go on from the checkpoint's; --finetune starts at 0
--per-dataset-sequences-path: give the blend with --data-path
--perform-rl-step --langrl-env-config --rl-* --grpo-* --no-rl-*: reinforcement learning is not served
--refit-method --inference-* --no-inference-* --decode-only-cuda-graphs* --enable-chunked-prefill* --flash-decode*
    --max-tokens-to-oom* --mlp-chunks-for-* --nccl-all-reduce-for-prefill* --num-speculative-tokens*
    --output-bert-embeddings* --use-legacy-static-engine* --onnx-safe*: inference is not served
--save-activations-interval --save-dgrads-interval --save-params-interval --save-tokens-per-expert-interval
    --save-wgrads-interval: intermediate values are not saved; library code can hook any module
--te-precision-config-file: all layers multiply as --fp8-format and --fp8-recipe say
--tensor-parallel-num-weight-shards --expert-tensor-parallel-num-weight-shards --gtp-*: weights are sharded by
    --use-megatron-fsdp and --expert-tensor-parallel-size
--export-te-mcore-model: post-training is not served: there is no export of quantized or pruned models
--fp8-*: this setting of FP8 is not served; use --fp8-format and --fp8-recipe delayed, tensorwise or blockwise
--fp4-*: FP4 needs Blackwell, and no recipe for it is served; use --fp8-format
--moe-*: this setting of experts is not served
--mtp-standalone*: --pipeline-model-parallel-layout says where layers of multi-token prediction are
--mtp-*: gradients of multi-token prediction go through the whole model, from the layers' own hidden states
--tp-comm-* --disable-tp-comm-*: tensor-parallel communication is not overlapped with the matrix products around it
--app-tag-* --one-logger-*: nothing is reported to one_logger
--straggler-*: single ranks are not timed
--error-injection-*: no step is run twice
--tokenizer-* --no-tokenizer-* --disable-tokenizer-*: tokenizers are configured by their file alone; use
    --tokenizer-type and --tokenizer-model
--ddp-*: there are no buckets: gradients are reduced unit by unit
--pipeline-*: this setting of pipeline stages is not served
--retro-*: retrieval models are not served
--vision-*: vision models are not served
--mamba-*: this setting of state-space layers is not served; states are in fp32
--hybrid-*: layers of a hybrid model are given by --hybrid-layer-pattern
--inprocess-*: restarts inside a process are not served; resume from the checkpoint
--hierarchical-context-parallel*: a sequence is split over one group of ranks; use --cp-comm-type p2p
--logits-load-* --logits-save-*: logits are not saved, and there is no distillation from a teacher's
--export-*: post-training is not served: neither distillation nor quantized or pruned models
--fault-injector-*: faults are not injected; benchmarks and tests of this repository do that by themselves
--biencoder-* --block-data-path* --classes-fraction* --data-per-class-fraction* --dino-* --embedding-path*
    --evidence-data-path* --ict-* --img-* --indexer-* --iter-per-epoch* --mask-factor* --mask-type* --num-channels*
    --num-classes* --patch-dim* --query-in-block-prob* --swin-* --titles-data-path* --use-one-sent-docs*: models of
    sentence pairs and of images are not served; only GPT models are
""")
