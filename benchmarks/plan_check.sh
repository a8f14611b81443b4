#!/usr/bin/env bash
# How near plans without GPUs come to GPUs: measures the machine's rates, trains a dozen short configurations on one and two GPUs,
# plans the same flags, and prints both beside each other.
#
#   bash benchmarks/plan_check.sh FOLDER
#
# FOLDER receives rates.json, a JSON file of each configuration, logs, and plan_check.md. Takes about six minutes on two GPUs; without
# GPUs tiny models rehearse it. Variables: PYTHON another python3; PLAN=0 leaves the plans for another machine, whose time costs less:
# `python benchmarks/plan_check.py compare FOLDER --rates FOLDER/rates.json`.
set -uo pipefail
out=$(realpath -m "${1:-$(mktemp -d)}")
cd "$(dirname "$0")/.."
mkdir -p "$out"
python=${PYTHON:-python3}
# NVLink multicast is off on the machines that this was written for, and must stay off.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} PYTHONUNBUFFERED=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF-expandable_segments:True}
num_gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
[ "$num_gpus" -gt 0 ] && most=$num_gpus || most=2
run() { "$python" -m torch.distributed.run --standalone --nproc-per-node "$@"; }
if [ "$most" -ge 2 ]; then
    run 2 tools/calibrate.py "$out/rates.json" > "$out/calibrate.log" 2>&1 || tail -n 20 "$out/calibrate.log"
    run 2 benchmarks/plan_check.py measure "$out" > "$out/measure_2.log" 2>&1 || tail -n 20 "$out/measure_2.log"
else
    run 1 tools/calibrate.py "$out/rates.json" > "$out/calibrate.log" 2>&1 || tail -n 20 "$out/calibrate.log"
fi
run 1 benchmarks/plan_check.py measure "$out" > "$out/measure_1.log" 2>&1 || tail -n 20 "$out/measure_1.log"
grep -h "^plan_check:" "$out"/measure_*.log
[ "${PLAN:-1}" = 0 ] && exit 0
rates=$out/rates.json
[ -e "$rates" ] || rates=h200
CUDA_VISIBLE_DEVICES="" "$python" benchmarks/plan_check.py compare "$out" --rates "$rates"
