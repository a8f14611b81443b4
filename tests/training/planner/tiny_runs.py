"""Launch lines of tiny models, which plans are made of."""

from __future__ import annotations

TINY = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 160 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--attention-dropout 0 --hidden-dropout 0 --train-iters 4 --lr 1e-3 --lr-decay-style constant --use-megatron-fsdp "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 250 --distributed-backend gloo --no-check-for-nan-in-loss-and-grad "
    "--transformer-impl local --init-model-with-meta-device"
)
"""As library code trains it, on two ranks."""

SMALLEST = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 "
    "--global-batch-size 64 --train-iters 2 --lr 1e-3 --bf16 --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 1000"
)
"""As users of ``tools/plan.py`` give it, with no more than it needs."""

EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 96 --moe-grouped-gemm --untie-embeddings-and-output-weights"
