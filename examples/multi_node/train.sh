#!/usr/bin/env bash
# Starts the ranks of one host; the same command on every host starts a run.
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=host0 RUN=/shared/run bash examples/multi_node/train.sh <flags of pretrain_gpt.py>
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=host0 RUN=/shared/run bash examples/multi_node/train.sh <the same flags>
#
# slurm.sbatch does this for all hosts of a job. Python must import torch: activate an environment, or set PYTHON.
#
# Settings (environment variables); without the first four, those that operators of torchrun on Kubernetes set are read
# (PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR, PET_MASTER_PORT, PET_NPROC_PER_NODE): kubernetes/ has examples
#   NNODES, NODE_RANK    hosts, and which this is (the first is 0)
#   MASTER_ADDR          address of the first host that all hosts reach
#   MASTER_PORT          a free port on it (default: 29500); gloo and NCCL need others between all hosts too
#   RUN                  folder that all hosts share, for checkpoints
#   RANKS_PER_NODE       (default: one for each GPU, 2 without any)
#   SHARDING             what is sharded within a host (default: optim_grads_params)
#   OUTER_SHARDING       over hosts: no_shard (default) keeps all of the model on each host and sums gradients over hosts
#                        once per step; optim shards the optimizer state over hosts too; all shards everything over all
#                        ranks as if they were on one host, for models that do not fit on one
#   SAVE_INTERVAL        iterations between checkpoints (default: 500): what a lost host costs at most
#   TIMEOUT_MINUTES      time after which a missing rank is an error on all others (default: 10)
#   NUMA_BINDING         binding of ranks to the cores near their GPUs, as torchrun has it, e.g. node (default: none)
#   COMPLETE_AT          iteration at which training is complete: a run that ends before, since it was told to, ends with status 75
#                        and not 0, for who starts what has failed again (default: any end is one)
#   RESTARTS             how often to start again after a failure, from the last checkpoint (default: 0)
#
# What happens
#   A host is lost     The ranks on other hosts end: at once if its connections close, after TIMEOUT_MINUTES if it just falls
#                      silent. They name the silent ranks and their host. Start the same command on all hosts again (with
#                      another host in its place): training continues from the last checkpoint in RUN, with the same losses.
#   SIGTERM            All ranks finish the step, save, and end with status 0. torchrun passes it on, and kills ranks that have
#                      not ended after 30 s. Under Slurm torchrun ignores it, since Slurm signals the ranks themselves: they
#                      have as long as the job has (slurm.sbatch asks for 5 minutes).
#   Fewer hosts        Checkpoints do not depend on the number of ranks: start with a smaller NNODES, as long as
#                      --global-batch-size is a multiple of the ranks.
#
# Networks with several interfaces
#   NCCL_SOCKET_IFNAME   interface on which NCCL's ranks find each other, e.g. eth0; a wrong one is a common cause of a hang
#   GLOO_SOCKET_IFNAME   the same for gloo (ranks on CPUs, and checkpoints' metadata)
#   NCCL_IB_HCA          InfiniBand adapters that NCCL may use, e.g. mlx5; `=mlx5_0:1,mlx5_1:1` for these ports alone
#   NCCL_DEBUG           WARN says why NCCL fails, INFO also which network it uses ("NET/IB", or "NET/Socket": slow)
# NCCL's flight recorder (TORCH_FR_BUFFER_SIZE, TORCH_NCCL_DUMP_ON_TIMEOUT) is switched on below: after a time-out each rank
# leaves the last collectives that it saw in RUN/nccl_trace.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON="${PYTHON:-python3}"

NNODES="${NNODES:-${PET_NNODES:-}}" NODE_RANK="${NODE_RANK:-${PET_NODE_RANK:-}}"
MASTER_ADDR="${MASTER_ADDR:-${PET_MASTER_ADDR:-}}" MASTER_PORT="${MASTER_PORT:-${PET_MASTER_PORT:-29500}}"
RANKS_PER_NODE="${RANKS_PER_NODE:-${PET_NPROC_PER_NODE:-}}"
for name in NNODES NODE_RANK MASTER_ADDR RUN; do
    [[ -n "${!name:-}" ]] || { echo "train.sh: $name must be set; see the head of examples/multi_node/train.sh" >&2; exit 2; }
done
if [[ -z "${RANKS_PER_NODE:-}" ]]; then
    RANKS_PER_NODE="$("$PYTHON" -c 'import torch; print(torch.cuda.device_count() or 2)')"
fi

sharding=(--use-megatron-fsdp --data-parallel-sharding-strategy "${SHARDING:-optim_grads_params}")
sharding+=(--overlap-grad-reduce --overlap-param-gather)
case "${OUTER_SHARDING:-no_shard}" in
    no_shard | optim)
        # Ranks of a host have consecutive numbers, so each instance, the inner axis, lies within one host (it is the host, without pipeline stages).
        if ((NNODES > 1)); then
            sharding+=(--num-distributed-optimizer-instances "$NNODES")
            sharding+=(--outer-dp-sharding-strategy "${OUTER_SHARDING:-no_shard}")
        fi
        ;;
    all) ;;
    *) echo "train.sh: OUTER_SHARDING must be no_shard, optim or all, got $OUTER_SHARDING" >&2; exit 2 ;;
esac
checkpoints=(--save "$RUN/checkpoints" --load "$RUN/checkpoints" --save-interval "${SAVE_INTERVAL:-500}")
checkpoints+=(--exit-signal-handler --distributed-timeout-minutes "${TIMEOUT_MINUTES:-10}")

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" NCCL_DEBUG="${NCCL_DEBUG:-WARN}" PYTHONUNBUFFERED=1
export TORCH_FR_BUFFER_SIZE="${TORCH_FR_BUFFER_SIZE:-2000}" TORCH_NCCL_DUMP_ON_TIMEOUT="${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}"
mkdir -p "$RUN/checkpoints" "$RUN/nccl_trace"
export TORCH_FR_DUMP_TEMP_FILE="${TORCH_FR_DUMP_TEMP_FILE:-$RUN/nccl_trace/rank_}"

launch=("$PYTHON" -m torch.distributed.run --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node "$RANKS_PER_NODE")
launch+=(--master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")
if [[ -n "${NUMA_BINDING:-}" ]]; then
    launch+=(--numa-binding "$NUMA_BINDING")
fi
if [[ -n "${SLURM_JOB_ID:-}" ]]; then
    # Ignored here and by torchrun; the ranks set their own handlers.
    on_term=''
    launch+=(--signals-to-handle SIGINT,SIGHUP,SIGQUIT)
else
    on_term='kill -TERM "$child" 2>/dev/null || true'
fi

for ((starts_left = ${RESTARTS:-0}; ; starts_left--)); do
    # In the background, since bash handles a signal only after a foreground child has ended.
    [[ -n "$on_term" ]] || trap '' TERM
    "${launch[@]}" pretrain_gpt.py "${sharding[@]}" "${checkpoints[@]}" "$@" &
    child=$!
    trap "$on_term" TERM
    while true; do
        status=0
        wait "$child" || status=$?
        kill -0 "$child" 2>/dev/null || break
    done
    iteration="$(cat "$RUN/checkpoints/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0)"
    if ((status == 0 && iteration < ${COMPLETE_AT:-0})); then
        echo "train.sh: training ended after iteration $iteration, and is complete at $COMPLETE_AT" >&2
        exit 75
    fi
    ((status != 0 && starts_left > 0)) || exit "$status"
    echo "train.sh: host $NODE_RANK ended with status $status; starting again, at most $starts_left times" >&2
    sleep 5
done
