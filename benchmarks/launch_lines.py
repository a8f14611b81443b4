"""Time launch lines as users start them, on one GPU: ``python3 benchmarks/launch_lines.py OUTPUT.md [MODEL[:VARIANT]...]``.

Each model is a real one with fewer layers, and its line has the flags of Megatron-LM. Each run is a process of its own: this
framework's ``pretrain_gpt.py``, and Megatron-LM's next to it where the variable MEGATRON_LM names its folder. The page has
medians of the later iterations, memory and losses. STEPS: iterations (12). Without a GPU, tiny models run on gloo.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
NUM_STEPS = int(os.environ.get("STEPS", "12"))
WARM_UP = NUM_STEPS // 2

_COMMON = (
    "--use-mcore-models --transformer-impl transformer_engine --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --cross-entropy-loss-fusion "
    "--use-distributed-optimizer --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --overlap-grad-reduce "
    "--overlap-param-gather --init-model-with-meta-device --no-gradient-accumulation-fusion --ckpt-format fsdp_dtensor "
    f"--mock-data --tokenizer-type NullTokenizer --manual-gc --bf16 --lr 1e-5 --lr-decay-style constant --clip-grad 1.0 "
    f"--train-iters {NUM_STEPS} --eval-iters 0 --log-interval 1 --log-memory-to-tensorboard"
)
_EXPERTS = (
    "--moe-grouped-gemm --moe-permute-fusion --moe-router-dtype fp32 --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3"
)
_SHAPE = (
    "--seq-length {length} --max-position-embeddings {length} --micro-batch-size {micro} --global-batch-size {batch}"
)
_BATCH = {"length": 4096, "micro": 2, "batch": 8}
MODELS = {
    "dense": "--num-layers 16 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --rotary-base 500000 --vocab-size 128256 --attention-backend fused "
    + _SHAPE.format(length=8192, micro=1, batch=4),
    "moe": "--num-layers 6 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 4 --kv-channels 128 --qk-layernorm --rotary-base 1000000 --vocab-size 32000 --attention-backend fused "
    f"--num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 {_EXPERTS} {_SHAPE.format(**_BATCH)}",
    "mla": "--num-layers 8 --hidden-size 2048 --ffn-hidden-size 10944 --num-attention-heads 16 --multi-latent-attention "
    "--kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm --vocab-size 32000 "
    "--num-experts 64 --moe-layer-freq [0]+[1]*7 --moe-router-topk 6 --moe-ffn-hidden-size 1408 "
    f"--moe-shared-expert-intermediate-size 2816 {_EXPERTS} {_SHAPE.format(**_BATCH)}",
}
_TINY = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 160 --num-attention-heads 4 --vocab-size 256 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 4"
)
TINY_MODELS = {
    "dense": _TINY,
    "moe": f"{_TINY} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 96 {_EXPERTS}",
    "mla": f"{_TINY} --multi-latent-attention --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 "
    f"--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 96 {_EXPERTS}",
}
_FP8 = "--fp8-format hybrid --fp8-param-gather --fp8-recipe"
VARIANTS = {
    "": "",
    "te": "--layer-kernels transformer_engine",
    "local": "--transformer-impl local",
    "delayed": f"{_FP8} delayed --fp8-amax-history-len 16 --fp8-amax-compute-algo max",
    "blockwise": f"{_FP8} blockwise",
}
_OURS_ONLY = ("te", "local")


@dataclass
class Run:
    """What one process printed."""

    ms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_mb: float = 0.0
    failure: str = ""

    @property
    def median_ms(self) -> float:
        return statistics.median(self.ms[WARM_UP:] or [0.0])


def read_log(text: str) -> Run:
    """Read the times, losses and memory from a log of either program."""
    run = Run()
    run.ms = [float(found) for found in re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", text)]
    run.losses = [float(found) for found in re.findall(r"lm loss: ([-+.\dEe]+)", text)]
    run.peak_mb = max(map(float, re.findall(r"max allocated: ([\d.]+)", text)), default=0.0)
    return run


def train(program: Path, flags: str, log: Path) -> Run:
    """Start the program on one rank and wait for it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", str(program)]
    environment = os.environ | {
        "PYTHONPATH": f"{program.parent}:{os.environ.get('PYTHONPATH', '')}",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [*command, *flags.split(), "--data-cache-path", cache],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=program.parent, check=False,
        )  # fmt: skip
    log.write_text(done.stdout)
    run = read_log(done.stdout)
    if done.returncode or len(run.ms) < NUM_STEPS:
        run.failure = f"exit status {done.returncode}: " + (done.stdout.strip().splitlines() or ["no output"])[-1][:200]
    return run


def programs() -> dict[str, Path]:
    """Return the programs by name, ours first."""
    found = {"this framework": ROOT / "pretrain_gpt.py"}
    if folder := os.environ.get("MEGATRON_LM"):
        found["Megatron-LM"] = Path(folder).resolve() / "pretrain_gpt.py"
    return found


def page(runs: dict[tuple[str, str], Run]) -> str:
    """Write the table of all runs."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu, a rehearsal"
    rows = [
        f"# Launch lines on one device ({device}, torch {torch.__version__})",
        "",
        f"Median of iterations {WARM_UP + 1} to {NUM_STEPS}.",
        "",
        "| line | program | ms a step | least | peak MB | first, last loss |",
        "|---|---|---|---|---|---|",
    ]
    for (line, program), run in runs.items():
        if run.failure:
            rows.append(f"| {line} | {program} | {run.failure} | | | |")
            continue
        losses = f"{run.losses[0]:.4f}, {run.losses[-1]:.4f}"
        rows.append(
            f"| {line} | {program} | {run.median_ms:.1f} | {min(run.ms[WARM_UP:]):.1f} | {run.peak_mb:.0f} | {losses} |"
        )
    return "\n".join(rows) + "\n"


def main(argv: list[str]) -> int:
    """Run the lines; return 1 where one failed."""
    if not argv:
        print(__doc__)
        return 2
    output, lines = Path(argv[0]), argv[1:] or list(MODELS)
    output.parent.mkdir(parents=True, exist_ok=True)
    on_gpu = torch.cuda.is_available()
    models = MODELS if on_gpu else TINY_MODELS
    backend = "nccl" if on_gpu else "gloo"
    runs: dict[tuple[str, str], Run] = {}
    for line in lines:
        model, _, variant = line.partition(":")
        for name, program in programs().items():
            if name != "this framework" and variant in _OURS_ONLY:
                continue
            flags = f"{_COMMON} {models[model]} --distributed-backend {backend} {VARIANTS[variant]}"
            log = output.with_name(f"{output.stem}_{line.replace(':', '_')}_{name.split()[0].lower()}.log")
            runs[line, name] = train(program, flags, log)
            output.write_text(page(runs))
    print(output.read_text())
    return int(any(run.failure for run in runs.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
