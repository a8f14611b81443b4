"""Command lines that users of Megatron-FSDP start training with, as far as their flags matter here."""

from __future__ import annotations

SMALLEST = """
--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --max-position-embeddings 8
--micro-batch-size 2 --train-iters 4 --lr 1e-3 --mock-data
"""

LLAMA3_8B = """
--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
--group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192
--position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0
--swiglu --normalization RMSNorm --init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p
--untie-embeddings-and-output-weights --disable-bias-linear
--micro-batch-size 1 --global-batch-size 128 --train-samples 1953125000 --lr-decay-samples 1949218748
--lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5
--lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16
--cross-entropy-loss-fusion --no-check-for-nan-in-loss-and-grad --manual-gc --empty-unused-memory-level 1
--exit-duration-in-mins 235
--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --no-gradient-accumulation-fusion
--calculate-per-token-loss --init-model-with-meta-device --ckpt-format fsdp_dtensor --grad-reduce-in-bf16 --use-nccl-ub
--fsdp-double-buffer --fsdp-manual-registration --fsdp-db-use-persist-buf-on-alloc-fail
--num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy no_shard
--megatron-fsdp-main-params-dtype fp32 --megatron-fsdp-main-grads-dtype auto --megatron-fsdp-grad-comm-dtype auto
--use-precision-aware-optimizer --cuda-graph-impl full_iteration --megatron-fsdp-max-pool-double-buffer
--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather
--tensor-model-parallel-size 1 --context-parallel-size 1 --sequence-parallel
--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
--mock-data --tokenizer-type NullTokenizer --vocab-size 128256 --data-cache-path cache --tiktoken-pattern v2
--split '99,1,0' --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1
--log-interval 1 --eval-iters 32 --eval-interval 100 --save-interval 1000 --log-throughput --logging-level 20
--distributed-timeout-minutes 60 --save checkpoints --load checkpoints --tensorboard-dir tensorboard
--profile --profile-step-start 8 --profile-step-end 12 --profile-ranks 0 --record-memory-history
--memory-snapshot-path snapshot.pickle
"""

DEEPSEEK_V3 = """
--distributed-timeout-minutes 60 --tensor-model-parallel-size 1 --expert-model-parallel-size 8
--expert-tensor-parallel-size 1 --context-parallel-size 1 --use-distributed-optimizer --overlap-grad-reduce
--overlap-param-gather --use-mcore-models --sequence-parallel --use-flash-attn --disable-bias-linear
--micro-batch-size 4 --global-batch-size 2048 --train-samples 585937500 --exit-duration-in-mins 220
--no-check-for-nan-in-loss-and-grad --manual-gc --manual-gc-interval 10 --recompute-granularity selective
--recompute-modules mlp moe mla_up_proj layernorm --transformer-impl transformer_engine --seq-length 4096
--data-cache-path cache --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer --data-path data
--split 99,1,0 --no-mmap-bin-files --no-create-attention-mask-in-dataloader --num-workers 6 --num-layers 61
--hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --kv-channels 128 --max-position-embeddings 4096
--position-embedding-type rope --rotary-base 10000 --make-vocab-size-divisible-by 3232 --normalization RMSNorm
--norm-epsilon 1e-6 --swiglu --untie-embeddings-and-output-weights --multi-latent-attention --attention-dropout 0.0
--hidden-dropout 0.0 --clip-grad 1.0 --weight-decay 0.1 --qk-layernorm --lr-decay-samples 584765624
--lr-warmup-samples 1536000 --lr-warmup-init 3.9e-7 --lr 3.9e-6 --min-lr 3.9e-7 --lr-decay-style cosine
--adam-beta1 0.9 --adam-beta2 0.95 --num-experts 256 --moe-layer-freq [0]*3+[1]*58 --moe-ffn-hidden-size 2048
--moe-shared-expert-intermediate-size 2048 --moe-router-load-balancing-type seq_aux_loss --moe-router-topk 8
--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --moe-router-pre-softmax --moe-grouped-gemm
--moe-aux-loss-coeff 1e-4 --moe-router-group-topk 4 --moe-router-num-groups 8 --moe-router-topk-scaling-factor 2.5
--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
--moe-router-dtype fp32 --moe-permute-fusion --moe-router-force-load-balancing --q-lora-rank 1536 --kv-lora-rank 512
--qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --rotary-scaling-factor 40 --mscale 1.0
--mscale-all-dim 1.0 --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1 --eval-iters 32 --eval-interval 100
--auto-detect-ckpt-format --load checkpoints --save checkpoints --save-interval 100 --dist-ckpt-strictness log_all
--init-method-std 0.02 --log-timers-to-tensorboard --log-memory-to-tensorboard --log-num-zeros-in-grad
--log-params-norm --log-validation-ppl-to-tensorboard --log-throughput --log-interval 1 --logging-level 40
--tensorboard-dir tensorboard --bf16 --enable-experimental --use-megatron-fsdp
--data-parallel-sharding-strategy optim_grads_params --no-gradient-accumulation-fusion --calculate-per-token-loss
--init-model-with-meta-device --ckpt-format fsdp_dtensor --fsdp-double-buffer --use-nccl-ub
--megatron-fsdp-grad-comm-dtype bf16 --megatron-fsdp-main-grads-dtype bf16 --profile --profile-step-start 10
--profile-step-end 12 --profile-ranks 0 --wandb-project project --wandb-exp-name name
"""

LLAMA3_8B_AS_SERVED = """
--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
--group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192
--position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0
--swiglu --normalization RMSNorm --init-method-std 0.0134 --attention-backend auto --apply-layernorm-1p
--untie-embeddings-and-output-weights --disable-bias-linear
--micro-batch-size 1 --global-batch-size 128 --train-samples 1953125000 --lr-decay-samples 1949218748
--lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5
--lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16
--cross-entropy-loss-fusion --no-check-for-nan-in-loss-and-grad --manual-gc --empty-unused-memory-level 1
--exit-duration-in-mins 235
--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --no-gradient-accumulation-fusion
--calculate-per-token-loss --init-model-with-meta-device --ckpt-format fsdp_dtensor --fsdp-double-buffer
--use-nccl-ub --fsdp-manual-registration --create-all-gather-group --cuda-graph-impl full_iteration
--megatron-fsdp-main-params-dtype fp32 --megatron-fsdp-main-grads-dtype auto --megatron-fsdp-grad-comm-dtype auto
--tensor-model-parallel-size 1 --context-parallel-size 1
--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
--mock-data --tokenizer-type NullTokenizer --vocab-size 128256 --data-cache-path cache
--split '99,1,0' --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1
--log-interval 1 --eval-iters 32 --eval-interval 100 --save-interval 1000 --log-throughput --logging-level 20
--distributed-timeout-minutes 60 --save checkpoints --load checkpoints --tensorboard-dir tensorboard
"""

MIXTRAL_8X7B = """
--use-mcore-models --disable-bias-linear --seq-length 4096 --max-position-embeddings 32768 --num-layers 32
--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --init-method-std 0.01 --attention-dropout 0.0
--hidden-dropout 0.0 --normalization RMSNorm --position-embedding-type rope --swiglu
--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 8 --no-masked-softmax-fusion
--no-position-embedding --rotary-base 1000000
--num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
--moe-grouped-gemm --moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce
--tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer.model --data-path corpus --split 99990,8,2
--micro-batch-size 1 --global-batch-size 256 --lr 1e-4 --train-iters 500000 --lr-decay-iters 320000
--lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 0.1 --lr-warmup-iters 500 --clip-grad 1.0 --bf16
--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --expert-model-parallel-size 8
--use-distributed-optimizer --sequence-parallel
--log-interval 1 --save-interval 10000 --eval-interval 1000 --eval-iters 10 --save checkpoints --load checkpoints
--tensorboard-dir checkpoints/tensorboard --no-load-optim --no-load-rng
"""

QWEN3_30B_A3B_AS_SERVED = """
--distributed-timeout-minutes 60 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
--expert-model-parallel-size 8 --context-parallel-size 1 --expert-tensor-parallel-size 1 --use-distributed-optimizer
--overlap-grad-reduce --overlap-param-gather --use-mcore-models --sequence-parallel --use-flash-attn
--disable-bias-linear --micro-batch-size 1 --global-batch-size 256 --train-samples 268554688
--no-check-for-nan-in-loss-and-grad --no-bias-swiglu-fusion --no-rope-fusion --manual-gc --manual-gc-interval 10
--recompute-activations --transformer-impl local --seq-length 4096 --data-cache-path cache --mock-data
--tokenizer-type NullTokenizer --vocab-size 151936 --split 99,1,0 --no-mmap-bin-files
--no-create-attention-mask-in-dataloader --num-workers 6 --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144
--num-attention-heads 32 --kv-channels 128 --group-query-attention --num-query-groups 4 --qk-layernorm
--max-position-embeddings 40960 --use-rotary-position-embeddings --rotary-percent 1.0 --rotary-base 1000000
--make-vocab-size-divisible-by 1188 --normalization RMSNorm --norm-epsilon 1e-6 --swiglu
--untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0 --clip-grad 1.0 --weight-decay 0.1
--lr-decay-samples 584765624 --lr-warmup-samples 1536000 --lr-warmup-init 1.2e-7 --lr 1.2e-4 --min-lr 1.2e-5
--lr-decay-style cosine --adam-beta1 0.9 --adam-beta2 0.95 --num-experts 128 --moe-ffn-hidden-size 768
--moe-router-load-balancing-type aux_loss --moe-router-topk 8 --moe-router-pre-softmax --moe-grouped-gemm
--moe-aux-loss-coeff 1e-3 --moe-z-loss-coeff 1e-3 --moe-token-dispatcher-type alltoall --moe-permute-fusion
--moe-router-dtype fp32 --eval-iters 32 --eval-interval 200 --save checkpoints --save-interval 500
--load checkpoints --auto-detect-ckpt-format --init-method-std 0.02 --log-timers-to-tensorboard
--log-memory-to-tensorboard --log-num-zeros-in-grad --log-params-norm --log-validation-ppl-to-tensorboard
--log-throughput --log-interval 1 --logging-level 40 --tensorboard-dir tensorboard --bf16 --enable-experimental
"""
