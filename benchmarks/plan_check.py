"""Compare plans of ``tools/plan.py`` with what GPUs do: run short trainings, then plan the same flags on a CPU.

    torchrun --nproc-per-node 2 benchmarks/plan_check.py measure FOLDER [NAME...]
    python benchmarks/plan_check.py compare FOLDER [--rates FILE]

``measure`` writes FOLDER/<ranks>_<name>.json: times of steps on the device, memory of the fullest rank, and kernels of one profiled
step. ``compare`` needs no GPU. Without GPUs ``measure`` rehearses with tiny models.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import pretrain_gpt
from benchmarks.measure.train_steps import TrainSteps
from megatron.core.distributed.fsdp import peer_memory_nbytes
from megatron.core.extensions import why_missing
from megatron.training.arguments import check_command_line, parse_settings
from megatron.training.launch.distributed_init import DistributedConfig, initialize_distributed
from megatron.training.launch.pretrain import pretrain
from megatron.training.planner import plan_run, rates_of

_STEPS, _WARM_UP = 12, 5
_PROFILED = _STEPS - 2
_COMMON = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    f"--train-iters {_STEPS} --lr 1e-5 --lr-decay-style constant --clip-grad 1.0 --bf16 --use-megatron-fsdp "
    "--data-parallel-sharding-strategy optim_grads_params --use-distributed-optimizer --overlap-grad-reduce "
    "--overlap-param-gather --init-model-with-meta-device --megatron-fsdp-grad-comm-dtype bf16 "
    "--use-precision-aware-optimizer --cross-entropy-loss-fusion --mock-data --tokenizer-type NullTokenizer "
    "--split 100,0,0 --eval-iters 0 --log-interval 1 --manual-gc --group-query-attention --create-all-gather-group "
    "--vocab-size 32000"
)
_7B = "--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --num-query-groups 8"
_1B = "--hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 16 --num-query-groups 8"
_MOE = (
    f"{_1B} --num-layers 8 --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 5632 --moe-aux-loss-coeff 0.01 "
    "--moe-grouped-gemm --moe-token-dispatcher-type alltoall"
)
_RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_GRAPH = "--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad"
_FP8 = "--transformer-impl transformer_engine --fp8-format hybrid --fp8-recipe delayed --fp8-param-gather"


@dataclass(frozen=True)
class Case:
    """One training. ``length``: tokens of a sequence; ``batch``: sequences of a microbatch; ``microbatches``: of a rank."""

    flags: str
    ranks: int = 2
    length: int = 4096
    batch: int = 1
    microbatches: int = 1
    transport: str = "nccl"
    data_ranks: int | None = None  # that have sequences of their own; None: all


CASES = {
    "dense": Case(f"--num-layers 16 {_7B}"),
    "dense-peer": Case(f"--num-layers 16 {_7B}", transport="peer_copy"),
    "dense-microbatches": Case(f"--num-layers 8 {_7B}", microbatches=4),
    "recomputed": Case(f"--num-layers 12 {_7B} {_RECOMPUTED}", batch=4),
    "hsdp": Case(f"--num-layers 8 {_7B} --num-distributed-optimizer-instances 2"),
    "tp2": Case(f"--num-layers 12 {_7B} --tensor-model-parallel-size 2 --sequence-parallel", data_ranks=1),
    "long": Case(f"--num-layers 6 {_7B}", length=16384),
    "small": Case(f"--num-layers 16 {_1B}", length=8192),
    "moe": Case(_MOE),
    "moe-ep2": Case(f"{_MOE} --expert-model-parallel-size 2 --moe-expert-rank-capacity-factor 2"),
    "fp8": Case(f"--num-layers 12 {_7B} {_FP8}"),
    "fp8-tp2": Case(f"--num-layers 12 {_7B} {_FP8} --tensor-model-parallel-size 2 --sequence-parallel", data_ranks=1),
    "graph": Case(f"--num-layers 16 {_1B} {_GRAPH}", length=2048),
    "moe-ep2-graph": Case(f"{_MOE} --expert-model-parallel-size 2 --moe-expert-rank-capacity-factor 2 {_GRAPH}"),
    "alone": Case(f"--num-layers 8 {_7B}", ranks=1, batch=2),
    "alone-moe": Case(_MOE, ranks=1),
    "alone-moe-graph": Case(f"{_MOE} --moe-expert-rank-capacity-factor 2 {_GRAPH}", ranks=1),
}
_TINY = "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --num-query-groups 2"


def flags_of(case: Case, world_size: int, *, is_tiny: bool = False, layers: str = "local") -> list[str]:
    """Return the flags of pretrain_gpt.py."""
    length = 64 if is_tiny else case.length
    batches = (case.data_ranks or world_size) * case.batch * case.microbatches
    flags = f"--transformer-impl {layers} {_COMMON} {case.flags} --micro-batch-size {case.batch} --global-batch-size {batches}"
    flags += f" --seq-length {length} --max-position-embeddings {length} --fsdp-transport {case.transport}"
    flags += " --distributed-backend " + ("gloo" if is_tiny else "nccl")
    if is_tiny:
        flags += f" {_TINY} --vocab-size 256" + (" --moe-ffn-hidden-size 64" if "--num-experts" in flags else "")
    return flags.split()


def _kernels(trace: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return number and milliseconds of kernels by name, those that took longest first."""
    found: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in trace:
        if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            sums = found[event["name"][:120]]
            sums[0], sums[1] = sums[0] + 1, sums[1] + float(event["dur"]) / 1e3
    return dict(sorted(found.items(), key=lambda item: -item[1][1])[:60])


def measure(folder: Path, names: Sequence[str]) -> None:
    """Train the cases of this number of ranks, or those that are named, and write what was measured. Ranks: all."""
    device = initialize_distributed(DistributedConfig())
    is_cuda, world_size = device.type == "cuda", dist.get_world_size()
    folder.mkdir(parents=True, exist_ok=True)
    for name, case in CASES.items():
        if name not in names if names else case.ranks != world_size:
            continue
        if (lacking := _lacking(case, is_cuda=is_cuda)) is not None:
            if dist.get_rank() == 0:
                print(f"plan_check: {name}: not run, {lacking}", flush=True)
            continue
        gc.collect()
        before = _outside(device)
        try:
            found = _train(case, device)
        except Exception:
            traceback.print_exc()
            continue
        if dist.get_rank() == 0:
            found |= {"name": name, "ranks": world_size, "outside_before": before}
            (folder / f"{world_size}_{name}.json").write_text(json.dumps(found, indent=1))
            print(f"plan_check: {name}: {found['median_ms']:.1f} ms, {found['peak'] / 2**30:.2f} GiB", flush=True)
    dist.destroy_process_group()


def _lacking(case: Case, *, is_cuda: bool) -> str | None:
    """Return what a case needs and is not here; None if it can run."""
    if not is_cuda and (case.transport != "nccl" or _GRAPH in case.flags or _FP8 in case.flags):
        return "it needs GPUs"
    why = why_missing("transformer_engine_layers") if _FP8 in case.flags else None
    return why and f"transformer-engine cannot be used: {why}"


def _train(case: Case, device: torch.device) -> dict[str, Any]:
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    flags = flags_of(case, dist.get_world_size(), is_tiny=not is_cuda)
    with tempfile.TemporaryDirectory() as folder, TrainSteps(is_cuda, profiled=_PROFILED) as steps:
        paths = [folder]
        dist.broadcast_object_list(paths)
        pretrain(
            parse_settings([*flags, "--data-cache-path", paths[0]]),
            model_provider=pretrain_gpt.model_provider,
            datasets_provider=pretrain_gpt.datasets_provider,
            forward_step=pretrain_gpt.forward_step,
        )
        ms = steps.milliseconds()
    timed = ms[_WARM_UP : _PROFILED - 1]
    memory = torch.zeros(4, dtype=torch.int64, device=device)
    if is_cuda:
        figures = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        memory = torch.tensor([*figures, peer_memory_nbytes(device), _outside(device)], device=device)
        dist.all_reduce(memory, op=dist.ReduceOp.MAX)
    allocated, reserved, shared, outside = memory.tolist()
    return {
        "flags": flags,
        "median_ms": statistics.median(timed),
        "ms": ms,
        "host_ms": steps.host_ms,
        "peak": allocated + shared,
        "reserved": reserved + shared,
        "peer_memory": shared,
        "outside": outside,
        "kernels": _kernels(steps.trace),
        "device": torch.cuda.get_device_name() if is_cuda else "CPU",
        "torch": torch.__version__,
    }


def _outside(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def compare(folder: Path, rates_name: str) -> str:
    """Plan all cases that were measured, and return a table of both."""
    rates = rates_of(rates_name)
    rows = [
        "| case | ranks | peak GiB, measured | planned | ratio | step ms, measured | planned | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for path in sorted(folder.glob("[0-9]*_*.json")):
        found = json.loads(path.read_text())
        line = check_command_line(found["flags"], world_size=found["ranks"], paths_exist=False)
        assert line.settings is not None, line.faults
        plan = plan_run(line.settings, rates)
        ms, gib = plan.step_seconds * 1e3, plan.peak_nbytes / 2**30
        peak = max(found["peak"] / 2**30, 1e-9)
        rows.append(
            f"| {found['name']} | {found['ranks']} | {peak:.2f} | {gib:.2f} | {gib / peak:.3f} | "
            f"{found['median_ms']:.1f} | {ms:.1f} | {ms / found['median_ms']:.3f} |"
        )
        print(rows[-1], flush=True)
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "compare"])
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "names", nargs="*", help="cases, on as many ranks as there are; none: all of this number of ranks"
    )
    parser.add_argument("--rates", default="h200", help="name, or file of tools/calibrate.py")
    options = parser.parse_args(argv)
    if options.what == "measure":
        measure(options.folder, options.names)
    else:
        table = compare(options.folder, options.rates)
        (options.folder / "plan_check.md").write_text(table + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
