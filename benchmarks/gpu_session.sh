#!/usr/bin/env bash
# One bounded visit to a GPU machine: tests, comparisons with the loss check, and the 1.1B model through pretrain_gpt.py.
#
#   bash benchmarks/gpu_session.sh FOLDER [PART...]
#
# PART: tests, losses, 1.1b, 7.2b, profile, pretrain; all of them, in this order, when none is named; by name also
# losses-7.2b and pretrain-7.2b. Each part has a time limit, and one that fails does not stop the others. FOLDER receives
# session.log, summary.txt, a page for each comparison and a profile of one step. The exit status is 1 where a part
# failed. Variables: COMMIT names the commit where there is no git; PYTHON another python3; ENGINES what is timed;
# LIMIT the seconds of every part, in place of its own.
set -uo pipefail
if [ $# -eq 0 ]; then
    sed -n '2,10p' "$0"
    exit 2
fi
out=$(realpath -m "$1")
shift
cd "$(dirname "$0")/.."
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(tests losses 1.1b 7.2b profile pretrain)
mkdir -p "$out"

# NVLink multicast is off on these machines and must stay off.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} PYTHONUNBUFFERED=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
python=${PYTHON:-python3}
num_gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
# Without a GPU the same parts run on two gloo ranks with the tiny model: a rehearsal.
num_ranks=$((num_gpus > 0 ? num_gpus : 2))
launch=("$python" -m torch.distributed.run --standalone --nproc-per-node "$num_ranks")
engines=${ENGINES:-ideal,fsdp2,ours,ours-linear,ours-linear-ag}

model() { # model SIZE: what stands in for it here
    if [ "$num_gpus" -gt 0 ]; then echo "$1"; else echo tiny; fi
}

# The machine has no pytest-timeout and no hypothesis: only files with GPU tests are collected, and pytest is not told to
# make an error of a setting that nobody reads.
part_tests() {
    local files
    mapfile -t files < <(grep -rlE 'mark\.gpu' tests --include='test_*.py' | sort)
    [ ${#files[@]} -gt 0 ] || { echo "no GPU tests"; return 0; }
    "$python" -m pytest -m gpu -x -q -W ignore::pytest.PytestConfigWarning "${files[@]}"
}

check_losses() { # check_losses SIZE TOKENS
    "${launch[@]}" benchmarks/compare.py --model "$(model "$1")" --tokens "$(tokens "$2")" --microbatches 2 \
        --engines fsdp2,ours,ours-linear --check-losses --output "$out/losses_$1.md"
}

compare() { # compare SIZE TOKENS
    "${launch[@]}" benchmarks/compare.py --model "$(model "$1")" --tokens "$(tokens "$2")" \
        --engines "$engines" --output "$out/compare_$1.md"
}

profile() { # profile SIZE TOKENS
    "${launch[@]}" benchmarks/compare.py --model "$(model "$1")" --tokens "$(tokens "$2")" \
        --engines fsdp2,ours,ours-linear --profile "$out"
}

pretrain() { # pretrain SIZE TOKENS
    local size
    case $(model "$1") in
        1.1b) size=(--num-layers 22 --hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 32 --num-query-groups 4) ;;
        7.2b) size=(--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --num-query-groups 8) ;;
        tiny) size=(--num-layers 3 --hidden-size 64 --ffn-hidden-size 160 --num-attention-heads 4 --num-query-groups 2) ;;
    esac
    "${launch[@]}" benchmarks/compare_pretrain.py "$out/pretrain_$1.md" "${size[@]}" \
        --group-query-attention --seq-length "$(tokens "$2")" --max-position-embeddings "$(tokens "$2")" \
        --position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear \
        --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 \
        --micro-batch-size 1 --global-batch-size "$num_ranks" --train-iters 20 --lr 1e-5 --lr-decay-style constant \
        --clip-grad 1.0 --bf16 --use-megatron-fsdp --use-distributed-optimizer \
        --data-parallel-sharding-strategy optim_grads_params --overlap-grad-reduce --overlap-param-gather \
        --init-model-with-meta-device --mock-data --tokenizer-type NullTokenizer --vocab-size 31999 \
        --eval-interval 1000 --eval-iters 0 --log-interval 1 --log-throughput
}

tokens() { # tokens N: what stands in for it here
    if [ "$num_gpus" -gt 0 ]; then echo "$1"; else echo 64; fi
}

run_part() {
    case $1 in
        tests) part_tests ;;
        losses) check_losses 1.1b 2048 ;;
        losses-7.2b) check_losses 7.2b 4096 ;;
        1.1b) compare 1.1b 2048 ;;
        7.2b) compare 7.2b 4096 ;;
        profile) profile 1.1b 2048 ;;
        pretrain) pretrain 1.1b 2048 ;;
        pretrain-7.2b) pretrain 7.2b 4096 ;;
    esac
}

limit_of() { # seconds of a part; the unnamed ones together stay below ten minutes
    case $1 in
        tests) echo 110 ;;
        losses | profile) echo 80 ;;
        1.1b) echo 90 ;;
        7.2b | losses-7.2b) echo 140 ;;
        pretrain) echo 90 ;;
        pretrain-7.2b) echo 170 ;;
        *) return 1 ;;
    esac
}

failed=0
summary=$out/summary.txt
: >"$summary"
: >"$out/session.log"
[ "$num_gpus" -gt 0 ] || echo "no GPU here: a rehearsal with the tiny model on $num_ranks gloo ranks" | tee -a "$summary"
for part in "${parts[@]}"; do
    if ! limit=$(limit_of "$part"); then
        echo "$part: must be one of tests, losses, losses-7.2b, 1.1b, 7.2b, profile, pretrain, pretrain-7.2b" | tee -a "$summary"
        failed=1
        continue
    fi
    limit=${LIMIT:-$limit}
    echo "==== $part, at most $limit s"
    started=$SECONDS
    # timeout runs programs, not functions: a shell of its own gets the functions and the variables that they read.
    timeout --kill-after=20 "$limit" bash -c "$(declare -f); $(declare -p launch python num_gpus num_ranks out engines)
        run_part $part" >"$out/.part" 2>&1
    status=$?
    tail -n "${TAIL:-60}" "$out/.part"
    { echo "==== $part"; cat "$out/.part"; } >>"$out/session.log"
    rm "$out/.part"
    case $status in
        0) word=passed ;;
        124 | 137) word="STOPPED after its $limit s" ;;
        *) word="FAILED with status $status" ;;
    esac
    [ $status -eq 0 ] || failed=1
    echo "$part: $word in $((SECONDS - started)) s" | tee -a "$summary"
done
echo "==== summary"
cat "$summary"
exit $failed
