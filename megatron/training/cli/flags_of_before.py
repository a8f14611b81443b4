"""Flags of earlier versions of Megatron-LM that its parser no longer has, or no longer heeds: scripts still contain them."""

from __future__ import annotations

from megatron.training.cli.flag_parser import AlwaysSo, by_flag

ALWAYS_SO_BEFORE: dict[str, AlwaysSo] = {
    "--DDP-impl": AlwaysSo(
        fact="gradients are reduced unit by unit, with the same sums",
        values=("local", "torch"),
        otherwise="use --use-megatron-fsdp, which shards",
    ),
    "--data-impl": AlwaysSo(
        fact="corpora are pairs of .bin and .idx files, which are mapped",
        values=("mmap", "infer"),
        otherwise="other kinds of files are not read; prepare the corpus again with tools/preprocess_data.py",
    ),
    "--use-gpu-initialization": AlwaysSo(fact="weights are drawn on the device, unless --use-cpu-initialization"),
    "--no-query-key-layer-scaling": AlwaysSo(
        fact="scores are divided by the layer's number with --apply-query-key-layer-scaling alone"
    ),
    **{
        flag: AlwaysSo(fact="functions are fused, unless a --no-...-fusion is given")
        for flag in ("--bias-gelu-fusion", "--bias-dropout-fusion", "--scaled-masked-softmax-fusion")
    },
    **{
        flag: AlwaysSo(fact="so it is, unless the flag with --no- is given")
        for flag in ("--save-optim", "--save-rng", "--load-optim", "--load-rng", "--save-all-rng", "--load-all-rng")
    },
    **{
        flag: AlwaysSo(fact="TensorBoard has the batch size and the learning rate of each step")
        for flag in ("--log-batch-size-to-tensorboard", "--log-learning-rate-to-tensorboard")
    },
    "--resume-dataloader": AlwaysSo(fact="a resumed run goes on with the next sample"),
}

SAID_ONCE_BEFORE = by_flag("""
--use-contiguous-buffers-in-local-ddp --no-contiguous-buffers-in-local-ddp --use-contiguous-buffers-in-ddp: there are no
    buffers of all gradients: they are reduced unit by unit
--mmap-warmup --skip-mmap-warmup: files are mapped, and read when a sample needs them
--align-param-gather --delay-param-gather --no-delay-grad-reduce --deallocate-pipeline-outputs
    --overlap-p2p-communication --scatter-gather-tensors-in-pipeline: stages gather and reduce each by its own plan, and
    pass on activations as the schedule has it
--async-tensor-model-parallel-allreduce --no-async-tensor-model-parallel-allreduce: the reduction of the input gradient
    overlaps the weight gradient
--no-log-learnig-rate-to-tensorboard --no-log-learning-rate-to-tensorboard: the learning rate is among the curves of
    TensorBoard
--distribute-checkpointed-activations: recomputed layers keep their whole input; --sequence-parallel divides it
--enable-one-logger: nothing is reported to one_logger
--use-dist-ckpt --dist-ckpt-format: --ckpt-format says how checkpoints are written
--use-legacy-models: models have Megatron-Core's structure, which computes the same
--legacy-tokenizer: tokenizers give the same ids as both of Megatron-LM's
""")
"""They change no numbers; those that Megatron-LM's parser no longer has are switches."""

RENAMED: dict[str, tuple[str, ...]] = {
    "--use-custom-fsdp": ("--use-megatron-fsdp",),
    "--keep-fp8-transpose-cache-when-using-custom-fsdp": ("--keep-fp8-transpose-cache",),
    "--intra-layer-model-parallel-size": ("--tensor-model-parallel-size",),
    "--inter-layer-model-parallel-size": ("--pipeline-model-parallel-size",),
    "--activations-checkpoint-granularity": ("--recompute-granularity",),
    "--activations-checkpoint-method": ("--recompute-granularity", "full", "--recompute-method"),
    "--activations-checkpoint-num-layers": ("--recompute-num-layers",),
    "--checkpoint-num-layers": ("--recompute-num-layers",),
    "--layernorm-epsilon": ("--norm-epsilon",),
    "--intermediate-size": ("--ffn-hidden-size",),
    "--hybrid-override-pattern": ("--hybrid-layer-pattern",),
    "--linear-attention-type": ("--experimental-attention-variant",),
    "--fp8-e4m3": ("--fp8-format", "e4m3"),
    "--fp8-hybrid": ("--fp8-format", "hybrid"),
    "--fp32-allreduce": ("--accumulate-allreduce-grads-in-fp32",),
    "--min-scale": ("--min-loss-scale",),
    "--no-scaled-masked-softmax-fusion": ("--no-masked-softmax-fusion",),
    "--override-lr-scheduler": ("--override-opt-param-scheduler",),
    "--use-checkpoint-lr-scheduler": ("--use-checkpoint-opt-param-scheduler",),
    "--save-iters": ("--save-interval",),
    "--tiktoken-special-tokens": ("--tokenizer-special-tokens",),
    "--train-data": ("--train-data-path",),
    "--valid-data": ("--valid-data-path",),
    "--val-data-path": ("--valid-data-path",),
    "--test-data": ("--test-data-path",),
}
"""Flags that have other names now, for the same: what is read in their place, before their values."""

_REPLACED = by_flag("""
--batch-size: --micro-batch-size
--eval-batch-size: --eval-global-batch-size
--warmup: --lr-warmup-fraction, --lr-warmup-iters or --lr-warmup-samples
--epochs: --train-iters or --train-samples
--model-parallel-size: --tensor-model-parallel-size
--expert-parallel: --expert-model-parallel-size
--moe-extended-tp: --expert-tensor-parallel-size
--moe-token-dropping: --moe-expert-capacity-factor
--moe-router-topk-limited-devices: --moe-router-num-groups and --moe-router-group-topk
--checkpoint-activations: --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
--scaled-upper-triang-masked-softmax-fusion: --no-masked-softmax-fusion to turn it off
--vocab: --vocab-file
--tokenizer-hf-include-special-tokens --tokenizer-hf-use-fast: nothing: it is the default
--model-spec: flags, which choose the layers
--standalone-embedding-stage: --account-for-embedding-in-pipeline-split
--kitchen-config-file --kitchen-recipe-number: --fp8-format and --fp8-recipe
""")
"""Flags in whose place there is another one, with another meaning: what to use instead."""

_ELSEWHERE = by_flag("""
--num-key-value-heads: --group-query-attention --num-query-groups
--rope-theta --rotary-theta --rotary-position-embeddings-theta: --rotary-base
--pad-vocab-size-to --extra-vocab-size: --padded-vocab-size
--wandb-entity-name: --wandb-entity
--wandb-project-name: --wandb-project
--train-tokens: --train-samples: the tokens divided by --seq-length
--lr-decay-tokens: --lr-decay-samples: the tokens divided by --seq-length
--lr-warmup-tokens: --lr-warmup-samples: the tokens divided by --seq-length
--train-weighted-split-paths --train-weighted-split-paths-path: --train-data-path
--valid-weighted-split-paths --valid-weighted-split-paths-path: --valid-data-path
--test-weighted-split-paths: --test-data-path
--use-llama2-rotary-position-embeddings: --position-embedding-type rope
--patch-tokenizer-type: --tokenizer-type
--valid-num-workers: --num-workers
--log-level: --logging-level
--use-flash-attn-v2 --use-flash-attn-triton: --use-flash-attn
--attention-head-type: --group-query-attention --num-query-groups 1, where queries share keys and values
--glu-activation: --swiglu or --geglu
--cpu-offloading --checkpoint-in-cpu: --cpu-offloading-num-layers
--cpu-offload --cpu-optimizer: --optimizer-cpu-offload
--shared-moe-ffn-hidden-size: --moe-shared-expert-intermediate-size
--partition-activations: --sequence-parallel
--no-pipeline-parallel: nothing: there is one stage unless --pipeline-model-parallel-size is given
--universal-checkpoint: nothing: any split loads what any other saved
--log-optimizer-states-to-tensorboard: --log-num-zeros-in-grad and --log-params-norm
--create-moe-param-group: nothing: experts are reduced over their own ranks
--disable-moe-token-dropping: nothing: tokens are dropped with --moe-expert-capacity-factor alone
--moe-expert-parallel-size --moe-expert-model-parallelism: --expert-model-parallel-size
--moe-num-experts: --num-experts
--moe-top-k: --moe-router-topk
--moe-loss-coeff --moe-loss-weight: --moe-aux-loss-coeff
--moe-capacity-factor --moe-train-capacity-factor --moe-eval-capacity-factor --moe-min-capacity:
    --moe-expert-capacity-factor
""")
"""Flags of programs that were made from Megatron-LM: what to use instead."""

REFUSED_BEFORE = (
    {flag: f"it is Megatron-LM's old name; use {other}" for flag, other in _REPLACED.items()}
    | {flag: f"it is no flag of Megatron-LM; use {other}" for flag, other in _ELSEWHERE.items()}
    | by_flag("""
--data-loader --lazy-loader --use-npy-data-loader --use-tfrecords --input-data-sizes-file --loose-json
    --presplit-sentences --text-key --eval-text-key --delim: data are given as .bin and .idx, by --data-path;
    tools/preprocess_data.py writes them from text
--disable-chunked-prefill --initialize-socket-comms --genfile --greedy --temperature --top_k --top_p --out-seq-length
    --num-samples --sample-input-file --sample-output-file --recompute: text is not generated here
--cache-dir --data-epochs --max-num-samples --pretrained-bert --faiss-use-gpu --report-topk-accuracies: models of
    sentence pairs are not served
--langrl-external-server --langrl-inference-server-conversation-template --langrl-inference-server-type: reinforcement
    learning is not served
--load-openai: weights of other programs are converted by tools/checkpoint/convert.py
--cloze-eval --strict-lambada --overlapping-eval --eval-hf --eval-seq-length --eval-max-preds-per-seq
    --max-preds-per-seq: evaluation is the loss on --data-path's validation and test parts
--nproc-per-node --nproc_per_node --nnodes --node-rank --node_rank --master-addr --master_addr --master-port
    --master_port --rdzv-backend --rdzv_backend: torchrun takes it: give it before the name of the script
--shuffle: its samples are shuffled by --seed, always
--renormalize-blend-weights: a weighted blend draws by the weights that are given
--num-unique-layers --param-sharing-style: layers do not share weights
--deep-init: weights are initialised as in GPT-2, always
--fp32-embedding --fp32-layernorm --fp32-tokentypes --embedding-weights-in-fp32: with --bf16, main weights are in fp32,
    and so are sums
--s3-cache-path: data are read from local files only
--offload-optimizer-states: optimizer state stays on the device; shard more
--max-seqlen-per-cp-rank: samples are packed without masks between documents
--zero-bubble* --enable-zero-bubble* --enable-zb* --enable-1f1b-v*: stages take turns by 1F1B or interleaved 1F1B; use
    --num-layers-per-virtual-pipeline-stage for smaller bubbles
--deepspeed* --zero-* --ds-* --deepscale*: DeepSpeed is not used; --use-megatron-fsdp --data-parallel-sharding-strategy
    optim, optim_grads or optim_grads_params shards as its stages 1, 2 and 3
""")
)
