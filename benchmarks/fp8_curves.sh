#!/usr/bin/env bash
# Loss curves in bf16 and in FP8: a GPT of 310 million parameters (24 layers of 1,024) on text, 500 steps of 32 sequences of 1,024
# tokens, the same data and seed in each precision, with the flags of pretrain_gpt.py.
#
#   bash benchmarks/fp8_curves.sh FOLDER [PREFIX]
#
# PREFIX: a corpus in Megatron's indexed format (PREFIX.bin, PREFIX.idx) of byte-level tokens, read again from its start where it
# is shorter than the 16.4 million tokens that are needed; default: the sources of Python's standard library, written to FOLDER.
# FOLDER receives fp8_curves.md, .csv and .svg. Variables: NPROC; ITERS (default 500); RUNS (default
# bf16,delayed,tensorwise,blockwise; the first is the reference); BATCH sequences of a step (default 32); EXTRA further flags of
# pretrain_gpt.py; TOKENIZER its flags of the tokenizer, for a PREFIX of other tokens; PYTHON another python3. Without a GPU a
# tiny model rehearses it.
set -euo pipefail
out=$(realpath -m "${1:-$(mktemp -d)}")
prefix=${2:-}
[ -z "$prefix" ] || prefix=$(realpath -m "$prefix")
cd "$(dirname "$0")/.."
mkdir -p "$out"
python=${PYTHON:-python3}
num_gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
# NVLink multicast is off on the machines that this was written for, and must stay off.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} PYTHONUNBUFFERED=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF-expandable_segments:True}
if [ "$num_gpus" -gt 0 ]; then
    nproc=${NPROC:-$num_gpus} length=1024 backend=nccl iterations=${ITERS:-500} batch=${BATCH:-32} interval=5
    shape=(--num-layers 24 --hidden-size 1024 --ffn-hidden-size 2816 --num-attention-heads 16)
else
    nproc=${NPROC:-2} length=64 backend=gloo iterations=${ITERS:-20} batch=4 interval=2
    shape=(--num-layers 2 --hidden-size 64 --ffn-hidden-size 160 --num-attention-heads 4)
fi
text=$(basename "$prefix")
if [ -z "$prefix" ]; then
    text="the sources of Python's standard library, byte by byte"
    prefix=$out/stdlib_text_document
    if [ ! -f "$prefix.idx" ]; then
        "$python" examples/stdlib_corpus.py --output-folder "$out/corpus"
        "$python" tools/preprocess_data.py --input "$out/corpus/train.jsonl" --output-prefix "$out/stdlib" \
            --tokenizer-type ByteLevelTokenizer --append-eod --workers 4
    fi
fi
note="text: $text, $(($(stat -c %s "$prefix.bin") / 1000000)) MB of tokens; $iterations steps read $((iterations * batch * length / 1000000)) million tokens"
echo "$note"
# shellcheck disable=SC2086 # EXTRA and TOKENIZER hold several words
"$python" -m torch.distributed.run --standalone --nproc-per-node "$nproc" benchmarks/compare_precisions.py "$out/fp8_curves.md" \
    --runs "${RUNS:-bf16,delayed,tensorwise,blockwise}" --bar-loss 0.005 --last 20 --warm-up 10 --note "$note" \
    "${shape[@]}" --seq-length $length --max-position-embeddings $length --position-embedding-type rope --swiglu \
    --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 \
    --micro-batch-size $((batch / nproc)) --global-batch-size $batch --train-iters "$iterations" --bf16 \
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters $((iterations / 10)) --weight-decay 0.1 \
    --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --seed 1234 \
    --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --use-distributed-optimizer \
    --overlap-grad-reduce --overlap-param-gather --init-model-with-meta-device --ckpt-format fsdp_dtensor \
    --cross-entropy-loss-fusion --distributed-backend $backend --data-path "$prefix" --data-cache-path "$out/cache" \
    --split 100,0,0 ${TOKENIZER:---tokenizer-type ByteLevelTokenizer} --num-workers 2 --eval-interval 100000 --eval-iters 0 \
    --manual-gc --log-interval $interval --log-throughput ${EXTRA:-} 2>&1 | tee "$out/fp8_curves.log"
