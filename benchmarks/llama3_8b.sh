#!/usr/bin/env bash
# Llama-3-8B as a user would start it, at the shape of Megatron-LM's own figures: sequence 8,192, bf16, 4 microbatches of one
# sequence, fully sharded, clipping 1.0, no recomputation. Prints the median of the iterations after the sixth.
#
#   bash benchmarks/llama3_8b.sh [FOLDER]
#
# FOLDER (default: a temporary one) receives pretrain.log. Variables: NPROC, ITERS (default 10), EXTRA (further flags, which stand
# last and so prevail, e.g. EXTRA="--fsdp-transport peer_copy" or EXTRA="--disable-jit-fuser"), PYTHON another python3.
# Gradients travel in bf16 and add up in fp32, as with Megatron-FSDP's own policy; this framework's default wire is fp32,
# as in Megatron-LM, hence --megatron-fsdp-grad-comm-dtype. RUNS, e.g. RUNS=local,bf16,delayed, trains in these precisions in
# turn by compare_precisions.py, which writes FOLDER/llama.md with times, memory, bytes gathered and losses. Without a GPU a
# tiny model rehearses the same flags.
set -euo pipefail
out=$(realpath -m "${1:-$(mktemp -d)}")
cd "$(dirname "$0")/.."
mkdir -p "$out"
python=${PYTHON:-python3}
num_gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
# NVLink multicast is off on the machines that this was written for, and must stay off.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} PYTHONUNBUFFERED=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF-expandable_segments:True}
if [ "$num_gpus" -gt 0 ]; then
    nproc=${NPROC:-$num_gpus} length=8192 backend=nccl
    shape=(--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --num-query-groups 8)
    vocabulary=128256
else
    nproc=${NPROC:-2} length=64 backend=gloo
    shape=(--num-layers 2 --hidden-size 64 --ffn-hidden-size 160 --num-attention-heads 4 --num-query-groups 2)
    vocabulary=256
fi
program=(pretrain_gpt.py)
[ -z "${RUNS:-}" ] || program=(benchmarks/compare_precisions.py "$out/llama.md" --runs "$RUNS" --warm-up 6)
# shellcheck disable=SC2086 # EXTRA holds several words
"$python" -m torch.distributed.run --standalone --nproc-per-node "$nproc" "${program[@]}" \
    "${shape[@]}" --group-query-attention --seq-length $length --max-position-embeddings $length \
    --position-embedding-type rope --rotary-base 500000 --swiglu --normalization RMSNorm --disable-bias-linear \
    --untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0 --init-method-std 0.0134 \
    --micro-batch-size 1 --global-batch-size $((4 * nproc)) --train-iters "${ITERS:-10}" --bf16 \
    --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 \
    --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --use-distributed-optimizer \
    --overlap-grad-reduce --overlap-param-gather --init-model-with-meta-device --ckpt-format fsdp_dtensor \
    --megatron-fsdp-grad-comm-dtype bf16 --cross-entropy-loss-fusion --distributed-backend $backend \
    --mock-data --tokenizer-type NullTokenizer --vocab-size $vocabulary --data-cache-path "$out/cache" --split 100,0,0 \
    --eval-iters 0 --manual-gc --log-interval 1 --log-throughput ${EXTRA:-} 2>&1 | tee "$out/pretrain.log"
[ -z "${RUNS:-}" ] || exit 0
"$python" - "$out/pretrain.log" <<'END'
import re
import statistics
import sys

lines = [line for line in open(sys.argv[1], encoding="utf-8") if "elapsed time per iteration" in line]


def median(pattern: str) -> float:
    found = [float(re.search(pattern + r"[^|]*: +([0-9.]+)", line)[1]) for line in lines[6:]]
    return statistics.median(found)


if len(lines) < 7:
    sys.exit(f"at least 7 iterations must be logged for the median of those after the sixth, got {len(lines)}")
print(
    f"median of iterations 7 to {len(lines)}: {median('elapsed time per iteration'):.1f} ms,"
    f" {median('tokens per second per GPU'):.1f} tokens/s per GPU, {median('throughput per GPU'):.1f} TFLOP/s per GPU"
)
for memory in re.findall(r"[^|]*\(MiB\): [0-9.]+", lines[-1]):
    name, value = memory.rsplit(":", 1)
    print(f"{name.strip().removesuffix('(MiB)').strip()}: {float(value) / 1024:.2f} GiB")
END
