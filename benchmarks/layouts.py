"""Train one model split in several ways: ``torchrun ... benchmarks/layouts.py OUTPUT.md [LAYOUT...]``.

Each layout trains 20 steps (STEPS in the environment: another number, at least 12) with flags of pretrain_gpt.py, one after the
other in the same processes. The page has times on the device, memory of the fullest rank (with what other ranks read),
losses, and how much communication one profiled step hides behind compute. Without GPUs a tiny model runs with the same
flags on gloo. A layout that fails on all ranks stops no other.
"""

from __future__ import annotations

import gc
import os
import re
import statistics
import sys
import tempfile
import traceback
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity

import pretrain_gpt
from benchmarks.measure.steps import GIB
from benchmarks.measure.train_steps import TrainSteps
from benchmarks.reports.page import facts_of_run
from benchmarks.reports.page import page as markdown_page
from megatron.core.distributed.fsdp import peer_memory_nbytes
from megatron.core.distributed.fsdp.overlap_report import Interval, length, overlap
from megatron.training.arguments import parse_settings
from megatron.training.launch.distributed_init import initialize_distributed
from megatron.training.launch.pretrain import pretrain

NUM_STEPS = int(os.environ.get("STEPS", "20"))
WARM_UP, PROFILED = 6, NUM_STEPS - 2
_NUM_OTHERS = 10  # the other kernels that a profile lists, those that take most time
_GEMM = re.compile(r"gemm|nvjet|cutlass|xmma|wgmma|flash|sdpa", re.IGNORECASE)

_COMMON = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 "
    f"--train-iters {NUM_STEPS} --lr 1e-5 --lr-warmup-iters 10 --lr-decay-style constant --clip-grad 1.0 --bf16 --use-megatron-fsdp "
    "--data-parallel-sharding-strategy optim_grads_params --use-distributed-optimizer --overlap-grad-reduce "
    "--overlap-param-gather --init-model-with-meta-device --megatron-fsdp-grad-comm-dtype bf16 "
    "--use-precision-aware-optimizer --cross-entropy-loss-fusion --mock-data --tokenizer-type NullTokenizer "
    "--split 100,0,0 --eval-iters 0 --log-interval 1 --manual-gc"
)
_GROUPED = "--group-query-attention --num-query-groups 8"
_DENSE = (
    f"--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 {_GROUPED} --vocab-size 32000"
)
_MOE = (
    f"--num-layers 16 --hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 16 {_GROUPED} --vocab-size 32000 "
    "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 5632 --moe-aux-loss-coeff 0.01 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall"
)
_EXPERTS_OF_DEEPSEEK = (
    "--normalization RMSNorm --multi-latent-attention --qk-layernorm --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0 "
    "--num-experts 32 --moe-layer-freq [0]+[1]*{moe_layers} --moe-router-topk 4 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3 --moe-router-num-groups 4 --moe-router-group-topk 2 "
    "--moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32 --moe-router-load-balancing-type seq_aux_loss "
    "--moe-aux-loss-coeff 1e-4 --moe-grouped-gemm --moe-token-dispatcher-type alltoall --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1"
)
_DEEPSEEK = (
    "--num-layers 12 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 16 --vocab-size 32000 --q-lora-rank 768 "
    "--kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --moe-ffn-hidden-size 1408 "
    f"--moe-shared-expert-intermediate-size 1408 {_EXPERTS_OF_DEEPSEEK.format(moe_layers=11)}"
)
_SMALLEST = "--num-layers 2 --hidden-size 64 --ffn-hidden-size 160 --num-attention-heads 4 --vocab-size 256"
_TINY = f"{_SMALLEST} --group-query-attention --num-query-groups 2"
_TINY_MOE = (
    f"{_TINY} --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 96 --moe-aux-loss-coeff 0.01 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall"
)
_TINY_DEEPSEEK = (
    f"{_SMALLEST} --q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 "
    f"--moe-ffn-hidden-size 96 --moe-shared-expert-intermediate-size 96 {_EXPERTS_OF_DEEPSEEK.format(moe_layers=1)}"
)
# On GPUs, and the rehearsal.
MODELS = {"dense": (_DENSE, _TINY), "moe": (_MOE, _TINY_MOE), "deepseek": (_DEEPSEEK, _TINY_DEEPSEEK)}


_NCCL = "--fsdp-transport nccl --create-all-gather-group"
_EP2 = f"{_NCCL} --expert-model-parallel-size 2"
_FP8 = "--transformer-impl transformer_engine --fp8-format hybrid --fp8-recipe delayed --fp8-param-gather"


@dataclass(frozen=True)
class Layout:
    """One way to split the model over the ranks.

    Attributes:
        what: in words.
        flags: those that not all layouts have.
        model: of ``MODELS``.
        length: tokens of a sequence; a step has one for each rank.
    """

    what: str
    flags: str = _NCCL
    model: str = "dense"
    length: int = 4096


_LONG = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
LAYOUTS = {
    "fsdp": Layout("pure FSDP over all ranks, NCCL"),
    "fsdp-peer": Layout("pure FSDP over all ranks, peer copy", "--fsdp-transport peer_copy"),
    "tp2": Layout(
        "tensor parallelism 2 with sequence parallelism, FSDP over the rest",
        f"{_NCCL} --tensor-model-parallel-size 2 --sequence-parallel",
    ),
    "pp2": Layout(
        "pipeline parallelism 2, whole weights on each stage's rank", f"{_NCCL} --pipeline-model-parallel-size 2"
    ),
    "hsdp": Layout(
        "two instances, weights and gradients sharded within each",
        f"{_NCCL} --num-distributed-optimizer-instances 2",
    ),
    "hfsdp": Layout(
        "the same, optimizer state sharded over all ranks",
        f"{_NCCL} --num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy optim",
    ),
    "cp2-32k": Layout(
        "context parallelism 2 at 32,768 tokens, each layer recomputed, FSDP over all ranks",
        f"{_NCCL} --context-parallel-size 2 {_LONG}",
        length=32768,
    ),
    "fsdp-32k": Layout(
        "pure FSDP at 32,768 tokens, each layer recomputed",
        f"{_NCCL} {_LONG}",
        length=32768,
    ),
    "moe": Layout("8 experts, top 2, pure FSDP", model="moe"),
    "moe-ep2": Layout(
        "8 experts, top 2, expert parallelism 2",
        _EP2,
        model="moe",
    ),
    "moe-ep2-bounded": Layout(
        "the same, with room for all rows, so that the host does not wait",
        f"{_EP2} --moe-expert-rank-capacity-factor 2",
        model="moe",
    ),
    "moe-ep2-graph": Layout(
        "the same as one CUDA graph",
        f"{_EP2} --moe-expert-rank-capacity-factor 2 --cuda-graph-impl full_iteration "
        "--no-check-for-nan-in-loss-and-grad",
        model="moe",
    ),
    "deepseek": Layout(
        "as DeepSeek-V3, 32 experts, pure FSDP", "--transformer-impl transformer_engine", model="deepseek"
    ),
    "deepseek-ep2": Layout(
        "the same, expert parallelism 2", f"{_EP2} --transformer-impl transformer_engine", model="deepseek"
    ),
    "deepseek-fp8": Layout("the same in FP8, pure FSDP", _FP8, model="deepseek"),
    "deepseek-fp8-ep2": Layout("the same in FP8, expert parallelism 2", f"{_EP2} {_FP8}", model="deepseek"),
}
DEFAULT = ("fsdp", "tp2", "hsdp", "moe", "moe-ep2")


@dataclass(kw_only=True)
class Run:
    """Times, memory and losses of one layout."""

    ms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    peak_gib: float = 0.0
    reserved_gib: float = 0.0
    profile: str = ""


def _run_of(steps: TrainSteps) -> Run:
    """Read what was recorded. Ranks: all."""
    run = Run(profile=summarize(steps.trace) if steps.trace else "")
    if steps.is_cuda:
        run.ms = steps.milliseconds()
        peaks = torch.tensor([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()], device="cuda")
        peaks += peer_memory_nbytes(torch.device("cuda", torch.cuda.current_device()))
        dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
        run.peak_gib, run.reserved_gib = (peak / GIB for peak in peaks.tolist())
    sums = torch.stack([record.loss_and_tokens for record in steps.records])
    dist.all_reduce(sums)  # ranks that hold layers of the same sequences count them once
    run.losses = (sums[:, 0] / sums[:, 1]).tolist()
    run.norms = [record.grad_norm.item() for record in steps.records]
    return run


def summarize(events: list[dict[str, Any]]) -> str:
    """Summarize a profiler's trace: communication beside matrix products and attention, and what else took time."""
    compute: list[Interval] = []
    everything: list[Interval] = []
    kinds: dict[str, list[Interval]] = defaultdict(list)
    others: list[Interval] = []
    times_of: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.get("ph") != "X" or event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        name, when = event["name"], (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        everything.append(when)
        found = re.search(r"nccl\w*?_(AllGather|ReduceScatter|AllReduce|SendRecv|Broadcast)", name)
        if found:
            kinds[f"{found[1]} of {event['args'].get('Group size', '?')} ranks"].append(when)
        elif name.startswith("Memcpy PtoP"):
            kinds["peer copies"].append(when)
        elif _GEMM.search(name):
            compute.append(when)
        else:
            others.append(when)
            times_of[name[:90]].append(float(event["dur"]))
    span = max((end for _, end in everything), default=0.0) - min((begin for begin, _ in everything), default=0.0)
    lines = [
        f"device at work: {length(everything) / 1e3:.1f} of {span / 1e3:.1f} ms",
        f"matrix products and attention: {length(compute) / 1e3:.1f} ms",
    ]
    lines += [
        f"{kind}: {len(spans)}, {length(spans) / 1e3:.1f} ms, of which beside those {overlap(spans, compute) / 1e3:.1f} ms, "
        f"beside any computation {overlap(spans, compute + others) / 1e3:.1f} ms"
        for kind, spans in sorted(kinds.items())
    ]
    longest = sorted(times_of.items(), key=lambda item: -sum(item[1]))[:_NUM_OTHERS]
    lines += [f"{sum(times) / 1e3:.1f} ms, {len(times)} of: {name}" for name, times in longest]
    return "\n".join(lines)


def train(layout: Layout, device: torch.device) -> Run:
    """Train with the layout. Ranks: all."""
    is_cuda = device.type == "cuda"
    model, tokens = (MODELS[layout.model][0], layout.length) if is_cuda else (MODELS[layout.model][1], 64)
    flags = (
        f"{_COMMON} {model} {layout.flags} --seq-length {tokens} --max-position-embeddings {tokens} "
        f"--global-batch-size {dist.get_world_size()} --distributed-backend {'nccl' if is_cuda else 'gloo'}"
    )
    gc.collect()
    if is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    both = (ProfilerActivity.CUDA, ProfilerActivity.CPU)
    with (
        tempfile.TemporaryDirectory() as folder,
        TrainSteps(is_cuda, profiled=PROFILED, activities=both) as steps,
    ):
        paths = [folder]
        dist.broadcast_object_list(paths)
        pretrain(
            parse_settings([*flags.split(), "--data-cache-path", paths[0]]),
            model_provider=pretrain_gpt.model_provider,
            datasets_provider=pretrain_gpt.datasets_provider,
            forward_step=pretrain_gpt.forward_step,
        )
        return _run_of(steps)


def report(runs: dict[str, Run], failed: dict[str, str], device: torch.device) -> str:
    """Write the page of all runs."""
    rows = [
        "| layout | what | median ms | min ms | peak allocated / reserved GiB | first, middle, last loss |",
        "|---|---|---|---|---|---|",
    ]
    for name, run in runs.items():
        timed = run.ms[WARM_UP : PROFILED - 1] or [0.0]
        losses = ", ".join(f"{run.losses[i]:.4f}" for i in (0, NUM_STEPS // 2 - 1, NUM_STEPS - 1))
        rows.append(
            f"| {name} | {LAYOUTS[name].what} | {statistics.median(timed):.1f} | {min(timed):.1f} | "
            f"{run.peak_gib:.1f} / {run.reserved_gib:.1f} | {losses} |"
        )
    sections = ["\n".join(rows)]
    sections += [f"- `{name}` did not run: {reason}" for name, reason in failed.items()]
    sections += [
        f"## {name}: one step of rank 0\n\n```\n{run.profile}\n```" for name, run in runs.items() if run.profile
    ]
    steps = ["| step | " + " | ".join(runs) + " |", "|---|" + "---|" * len(runs)]
    for step in range(NUM_STEPS):
        cells = (f"{run.losses[step]:.5f}, {run.norms[step]:.4f}" for run in runs.values())
        steps.append(f"| {step + 1} | " + " | ".join(cells) + " |")
    sections.append("## Losses and gradient norms\n\n" + "\n".join(steps))
    parameters = (
        "7.2B dense, 16 layers of 8 experts, and 12 layers of 32 experts as in DeepSeek-V3"
        if device.type == "cuda"
        else "tiny ones, a rehearsal"
    )
    facts = facts_of_run(device, [("models", parameters), ("steps", f"{NUM_STEPS}, timed without the first {WARM_UP}")])
    return markdown_page("Layouts of one trainer", facts, sections)


def main(argv: list[str]) -> int:
    """Run the layouts; return 1 where one failed."""
    output, names = Path(argv[0]), argv[1:] or list(DEFAULT)
    backend = ["--distributed-backend", "nccl" if torch.cuda.is_available() else "gloo"]
    device = initialize_distributed(
        parse_settings(
            [
                *_COMMON.split(),
                *_TINY.split(),
                *backend,
                "--seq-length",
                "64",
                "--max-position-embeddings",
                "64",
                "--global-batch-size",
                "64",
            ]
        ).distributed
    )
    runs: dict[str, Run] = {}
    failed: dict[str, str] = {}
    for name in names:
        try:
            runs[name] = train(LAYOUTS[name], device)
        except Exception as error:
            traceback.print_exc()
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if dist.get_rank() == 0:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(report(runs, failed, device))
    if dist.get_rank() == 0:
        print(output.read_text())
    dist.destroy_process_group()
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
