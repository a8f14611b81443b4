#!/usr/bin/env bash
# A GPT of 20 billion parameters (44 layers of 6,144) on one GPU, with optimizer state in the host's memory.
#
#   bash benchmarks/offload.sh FOLDER
#
# Needs a GPU of 141 GB and 250 GB of the host's memory: 85 % of the parameters have 12 bytes each there. Runs eight iterations twice,
# with updates before the next forward and beside it, and compares their time with what copies and the host's cores allow.
# FOLDER receives both logs and offload.txt. Variables: LAYERS, HIDDEN, FRACTION, BATCH (sequences of a step), LENGTH, ITERS, EXTRA
# further flags of pretrain_gpt.py; WAYS one of "before" and "beside"; PYTHON another python3. Without a GPU a tiny model rehearses it.
set -euo pipefail
out=$(realpath -m "${1:-$(mktemp -d)}")
cd "$(dirname "$0")/.."
mkdir -p "$out"
python=${PYTHON:-python3}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} PYTHONUNBUFFERED=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF-expandable_segments:True}
fraction=${FRACTION:-0.85} iterations=${ITERS:-8}
if [ "$("$python" -c 'import torch; print(torch.cuda.device_count())')" -gt 0 ]; then
    layers=${LAYERS:-44} hidden=${HIDDEN:-6144} heads=48 batch=${BATCH:-16} length=${LENGTH:-2048} backend=nccl probe=()
else
    layers=${LAYERS:-2} hidden=${HIDDEN:-64} heads=4 batch=${BATCH:-2} length=${LENGTH:-32} backend=gloo probe=(--numel 65536)
fi
parameters=$("$python" -c "print(int($fraction * (12 * $layers * $hidden**2 + 2 * 50304 * $hidden)))")
: > "$out/offload.txt"
for way in ${WAYS:-before beside}; do
    overlap=()
    [ $way = before ] || overlap=(--overlap-cpu-optimizer-d2h-h2d)
    # shellcheck disable=SC2086 # EXTRA holds several words
    "$python" -m torch.distributed.run --standalone --nproc-per-node 1 pretrain_gpt.py --use-megatron-fsdp \
        --data-parallel-sharding-strategy no_shard --num-layers "$layers" --hidden-size "$hidden" --num-attention-heads $heads \
        --seq-length "$length" --max-position-embeddings "$length" --position-embedding-type rope --normalization RMSNorm \
        --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --bf16 \
        --use-precision-aware-optimizer --grad-reduce-in-bf16 --init-model-with-meta-device --cross-entropy-loss-fusion \
        --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \
        --optimizer-cpu-offload --optimizer-offload-fraction "$fraction" "${overlap[@]}" \
        --micro-batch-size "$batch" --global-batch-size "$batch" --train-iters "$iterations" --lr 1e-5 --eval-iters 0 \
        --mock-data --tokenizer-type NullTokenizer --vocab-size 50303 --num-workers 0 --log-interval 1 --log-throughput \
        --distributed-backend $backend ${EXTRA:-} 2>&1 | tee "$out/$way.log"
    echo "updates $way the next forward" >> "$out/offload.txt"
    "$python" benchmarks/offload_probe.py --parameters "$parameters" --log "$out/$way.log" "${probe[@]}" >> "$out/offload.txt"
done
cat "$out/offload.txt"
