#!/usr/bin/env bash
# One bounded visit to a GPU machine: tests, and comparisons with other engines against the bars of benchmarks/reports/bars.py.
#
#   bash benchmarks/gpu_session.sh FOLDER [PART...]
#
# PART: tests, bars-1.1b, bars-7.2b and bars-7.2b-1024; all of them, in this order, when none is named. By name also
# losses50 (fifty steps beside FSDP2, kernels that add in a fixed order), symm-1.1b, symm-7.2b and symm-7.2b-1024
# (NCCL's symmetric memory, without expandable segments), mb4-1.1b and mb4-7.2b (four microbatches), units-1.1b (several layers a unit), ablations-1.1b,
# ablations-7.2b and ablations-7.2b-1024, losses-7.2b, profile-1.1b, profile-7.2b and profile-7.2b-1024, pretrain-1.1b
# and pretrain-7.2b, overlap-1.1b and overlap-7.2b (overlap reports, and what they cost other steps), llama, and of FP8,
# which needs transformer-engine: fp8-7.2b-1024 (steps in bf16 and FP8), fp8-curves (losses of 500 steps, fp8_curves.sh)
# and fp8-parts (a layer with each part exchanged, one GPU); and of the tuner beside settings chosen by hand
# (tune_check.py) tune-dense, tune-small, tune-moe, tune-moe-graph, tune-fp8 and tune-alone (one GPU). Each part has a
# time limit, and one that fails does not stop the others. FOLDER receives session.log, summary.txt, a page for each comparison and a
# profile of one step. The exit status is 1 where a part failed. Variables: COMMIT names the commit where there is no git;
# PYTHON another python3; ENGINES what is compared, checked or profiled (for fp8-7.2b-1024 and fp8-curves: runs of
# compare_precisions.py); STEPS the measured steps; TESTS the test files; EXTRA_PYTHONPATH folders of unpacked packages such
# as megatron-fsdp; EXTRA further flags of pretrain_gpt.py for pretrain-*, llama, fp8-7.2b-1024 and fp8-curves; DATA the
# corpus of fp8-curves; LIMIT the seconds of every part, in place of its own.
set -uo pipefail
if [ $# -eq 0 ]; then
    sed -n '2,20p' "$0"
    exit 2
fi
out=$(realpath -m "$1")
shift
extra=
IFS=: read -ra folders <<<"${EXTRA_PYTHONPATH:-}"
for folder in "${folders[@]}"; do extra+=:$(realpath -m "$folder"); done
cd "$(dirname "$0")/.."
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(tests bars-1.1b bars-7.2b bars-7.2b-1024)
mkdir -p "$out"

# NVLink multicast is off on these machines and must stay off.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} PYTHONUNBUFFERED=1 PYTHONPATH=$PWD$extra${PYTHONPATH:+:$PYTHONPATH}
python=${PYTHON:-python3}
num_gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
# Without a GPU the same parts run on two gloo ranks with the tiny model: a rehearsal.
num_ranks=$((num_gpus > 0 ? num_gpus : 2))
launch=("$python" -m torch.distributed.run --standalone --nproc-per-node "$num_ranks")
# Last, since megatron-fsdp leaves memory allocated in the process.
peers=megatron-fsdp,megatron-fsdp-v2

model() { # model SIZE: what stands in for it here
    if [ "$num_gpus" -gt 0 ]; then echo "$1"; else echo tiny; fi
}

# The machine has no pytest-timeout and no hypothesis: only files with GPU tests are collected, and pytest is not told to
# make an error of a setting that nobody reads. Most of a test's time is the start of its ranks, so several files run at
# a time; those that trace, time or weigh a whole device come after them, alone.
part_tests() {
    local files together alone
    if [ -n "${TESTS:-}" ]; then
        read -ra files <<<"$TESTS"
    else
        mapfile -t files < <(grep -rlE 'mark\.gpu' tests --include='test_*.py' | sort)
    fi
    [ ${#files[@]} -gt 0 ] || { echo "no GPU tests"; return 0; }
    local measures='device_trace|mem_get_info|perf_counter|elapsed_time' slow='test_cuda_graph_gpu|test_symmetric_cuda|/test_cuda.py'
    mapfile -t alone < <(grep -lE "$measures" "${files[@]}")
    mapfile -t together < <(grep -LE "$measures" "${files[@]}")
    # The slowest first, each of their tests by itself.
    mapfile -t together < <(
        printf '%s\n' "${together[@]}" | grep -E "$slow" | xargs -r grep -HoE '^def test_\w+' | sed 's/:def /::/'
        printf '%s\n' "${together[@]}" | grep -vE "$slow"
    )
    local status=0
    test_files 8 "${together[@]}" || status=1
    test_files 1 "${alone[@]}" || status=1
    return $status
}

test_files() { # test_files COUNT FILE...: so many at a time; the output of each file in one piece
    local count=$1
    shift
    [ $# -gt 0 ] || return 0
    printf '%s\n' "$@" | PYTHON=$python xargs -P "$count" -I{} bash -c '
        log=$(mktemp)
        started=$SECONDS
        "$PYTHON" -m pytest -m gpu --maxfail 5 -q --durations 3 -W ignore::pytest.PytestConfigWarning "$1" >"$log" 2>&1
        status=$?
        [ $status -eq 5 ] && status=0 # nothing to run here
        cat <(echo "-- $1: status $status, $((SECONDS - started)) s") "$log"
        rm "$log"
        exit $status' _ {}
}

compare() { # compare PAGE SIZE TOKENS ENGINES [ARGUMENT...]: with memory that grows in place
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True compare_plain "$@" --expandable-segments
}

compare_plain() { # compare_plain PAGE SIZE TOKENS ENGINES [ARGUMENT...]
    "${launch[@]}" benchmarks/compare.py --model "$(model "$2")" --tokens "$(tokens "$3")" --engines "${ENGINES:-$4}" \
        ${STEPS:+--steps "$STEPS"} --output "$out/$1.md" "${@:5}"
}

profile() { # profile SIZE TOKENS ENGINES
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "${launch[@]}" benchmarks/compare.py --model "$(model "$1")" \
        --tokens "$(tokens "$2")" --engines "${ENGINES:-$3}" --profile "$out" --expandable-segments
}

# What each optimisation gains: the best, and the best without one of them.
ablations() { # ablations SIZE TOKENS
    local best=ours-peer
    compare "ablations_$1_$2" "$1" "$2" "ideal,fsdp2,$best,$best+plain,$best+nosync,$best+nooverlap,$best+fp32main,$best+torchadam,ours-nccl,ours-nccl+together,$best-graph"
}

trainer() { # trainer SIZE TOKENS PROGRAM PAGE [ARGUMENT...]: a program that takes the flags of pretrain_gpt.py
    local size
    case $(model "$1") in
        1.1b) size=(--num-layers 22 --hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 32 --num-query-groups 4) ;;
        7.2b) size=(--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --num-query-groups 8) ;;
        tiny) size=(--num-layers 3 --hidden-size 64 --ffn-hidden-size 160 --num-attention-heads 4 --num-query-groups 2) ;;
    esac
    # shellcheck disable=SC2086 # EXTRA holds several words
    PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF-expandable_segments:True} "${launch[@]}" "benchmarks/$3" "$out/$4" "${size[@]}" \
        --group-query-attention --seq-length "$(tokens "$2")" --max-position-embeddings "$(tokens "$2")" \
        --position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear \
        --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 \
        --micro-batch-size 1 --global-batch-size "$num_ranks" --train-iters 20 --lr 1e-5 --lr-decay-style constant \
        --clip-grad 1.0 --bf16 --use-megatron-fsdp --use-distributed-optimizer \
        --data-parallel-sharding-strategy optim_grads_params --overlap-grad-reduce --overlap-param-gather \
        --init-model-with-meta-device --mock-data --tokenizer-type NullTokenizer --vocab-size 32000 \
        --eval-interval 1000 --eval-iters 0 --log-interval 1 --log-throughput "${@:5}" ${EXTRA:-}
}

pretrain() { # pretrain SIZE TOKENS
    trainer "$1" "$2" compare_pretrain.py "pretrain_$1.md"
}

overlap() { # overlap SIZE TOKENS
    trainer "$1" "$2" overlap_cost.py "overlap_$1.md" --fsdp-transport "${TRANSPORT:-auto}" --manual-gc
}

# Steps in bf16 and in FP8 with the dtypes of compare.py: gradients in bf16, on the wire and where they rest, no clipping.
precisions() { # precisions SIZE TOKENS
    trainer "$1" "$2" compare_precisions.py "fp8_$1_$2.md" --runs "${ENGINES:-local,bf16,delayed,local+graph,delayed+graph}" \
        --bar-speed 1.25 --train-iters "${STEPS:-40}" --clip-grad 0 --megatron-fsdp-grad-comm-dtype bf16 \
        --megatron-fsdp-main-grads-dtype bf16 --cross-entropy-loss-fusion --manual-gc
}

tokens() { # tokens N: what stands in for it here
    if [ "$num_gpus" -gt 0 ]; then echo "$1"; else echo 64; fi
}

tune() { # tune NAME: a case of tune_check.py
    local ranks=$num_ranks
    [ "$1" = alone ] && ranks=1
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
        benchmarks/tune_check.py "$out/tune" "$1" --seconds "${TUNE_SECONDS:-120}"
}

llama() {
    [ -f benchmarks/llama3_8b.sh ] || { echo "there is no benchmarks/llama3_8b.sh"; return 1; }
    PYTHON=$python bash benchmarks/llama3_8b.sh "$out/llama"
}

run_part() {
    local small=ideal,fsdp2,ours-plain,ours-nccl,ours-peer,ours-nccl-graph,ours-peer-graph large=ideal,fsdp2,ours-nccl,ours-peer,ours-peer-graph
    case $1 in
        tests) part_tests ;;
        bars-1.1b) compare bars_1.1b_2048 1.1b 2048 "$small,$peers" ;;
        bars-7.2b) compare bars_7.2b_4096 7.2b 4096 "$large,$peers" ;;
        bars-7.2b-1024) compare bars_7.2b_1024 7.2b 1024 "$large,$peers" ;;
        symm-1.1b) compare_plain symm_1.1b_2048 1.1b 2048 ideal,fsdp2,ours-nccl,ours-symm,ours-symm-graph ;;
        symm-7.2b) compare_plain symm_7.2b_4096 7.2b 4096 ideal,fsdp2,ours-nccl,ours-symm ;;
        symm-7.2b-1024) compare_plain symm_7.2b_1024 7.2b 1024 ideal,fsdp2,ours-nccl,ours-symm ;;
        mb4-1.1b) compare mb4_1.1b_2048 1.1b 2048 "$large,$peers" --microbatches 4 ;;
        mb4-7.2b) compare mb4_7.2b_4096 7.2b 4096 "$large,megatron-fsdp" --microbatches 4 ;;
        units-1.1b) compare units_1.1b_2048 1.1b 2048 \
            ideal,fsdp2,ours-peer,ours-peer+layers=2,ours-peer+layers=4,ours-nccl,ours-nccl+layers=2,ours-nccl+layers=4 ;;
        ablations-1.1b) ablations 1.1b 2048 ;;
        ablations-7.2b) ablations 7.2b 4096 ;;
        ablations-7.2b-1024) ablations 7.2b 1024 ;;
        losses50) STEPS=${STEPS:-50} compare losses_1.1b_2048 1.1b 2048 "${small#ideal,},megatron-fsdp" --microbatches 2 --check-losses --deterministic ;;
        losses-7.2b) compare losses_7.2b_4096 7.2b 4096 fsdp2,ours-nccl,ours-peer --check-losses ;;
        profile-1.1b) profile 1.1b 2048 "$large" ;;
        profile-7.2b) profile 7.2b 4096 "$large" ;;
        profile-7.2b-1024) profile 7.2b 1024 "$large" ;;
        pretrain-1.1b) pretrain 1.1b 2048 ;;
        pretrain-7.2b) pretrain 7.2b 4096 ;;
        overlap-1.1b) overlap 1.1b 2048 ;;
        overlap-7.2b) overlap 7.2b 1024 ;;
        tune-*) tune "${1#tune-}" ;;
        llama) llama ;;
        fp8-7.2b-1024) precisions 7.2b 1024 ;;
        fp8-curves) PYTHON=$python NPROC=$num_ranks ITERS=${STEPS:-} RUNS=${ENGINES:-} bash benchmarks/fp8_curves.sh "$out" "${DATA:-}" ;;
        fp8-parts) "$python" benchmarks/layer_parts.py --output "$out/fp8_parts.md" ;;
    esac
}

limit_of() { # seconds of a part; the unnamed ones together stay below ten minutes
    case $1 in
        tests) echo 360 ;;
        losses50) echo 130 ;;
        bars-1.1b | bars-7.2b-1024) echo 110 ;;
        bars-7.2b) echo 150 ;;
        symm-* | units-1.1b | losses-7.2b | pretrain-1.1b) echo 120 ;;
        mb4-1.1b) echo 130 ;;
        ablations-* | profile-*) echo 180 ;;
        mb4-7.2b | pretrain-7.2b | overlap-*) echo 240 ;;
        tune-dense | tune-small | tune-moe | tune-moe-graph | tune-fp8 | tune-alone) echo 320 ;;
        llama) echo 400 ;;
        fp8-parts) echo 180 ;;
        fp8-7.2b-1024) echo 240 ;;
        fp8-curves) echo 420 ;;
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
        echo "$part: must be one of those that $0 names when it is called without arguments" | tee -a "$summary"
        failed=1
        continue
    fi
    limit=${LIMIT:-$limit}
    echo "==== $part, at most $limit s"
    started=$SECONDS
    # timeout runs programs, not functions: a shell of its own gets the functions and the variables that they read.
    timeout --kill-after=20 "$limit" bash -c "$(declare -f); $(declare -p launch python num_gpus num_ranks out peers)
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
