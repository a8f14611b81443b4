"""Compare two checkouts bit by bit: losses, norms and checkpoints of twelve launch lines on CPU ranks.

``python -m tests.parity.bits OLD NEW`` runs each line in both checkouts and prints a row for it; its exit status is 1 where any
bit differs. Use it for changes that must not change numbers. ``--python`` names another interpreter (another torch).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

_COMMON = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --mock-data "
    "--micro-batch-size 2 --global-batch-size 16 --train-iters 4 --lr 1e-2 --clip-grad 0.5 --weight-decay 0.1 "
    "--tokenizer-type NullTokenizer --vocab-size 100 --log-interval 1 --eval-iters 0 --num-workers 0 --use-megatron-fsdp "
    "--distributed-backend gloo --ckpt-format fsdp_dtensor --transformer-impl local"
)
_MOE = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --swiglu --disable-bias-linear"
_HYBRID = "--num-distributed-optimizer-instances 2 --data-parallel-sharding-strategy optim_grads_params"
# {name: (ranks, flags)}
LINES = {
    "no_shard": (2, "--data-parallel-sharding-strategy no_shard"),
    "optim": (2, "--data-parallel-sharding-strategy optim --bf16"),
    "optim_grads": (2, "--data-parallel-sharding-strategy optim_grads"),
    "optim_grads_params": (2, "--data-parallel-sharding-strategy optim_grads_params --bf16"),
    "hsdp": (4, f"{_HYBRID} --outer-dp-sharding-strategy no_shard"),
    "hfsdp": (4, f"{_HYBRID} --outer-dp-sharding-strategy optim"),
    "tp": (
        4,
        "--data-parallel-sharding-strategy optim_grads_params --tensor-model-parallel-size 2 --sequence-parallel",
    ),
    "cp": (4, "--data-parallel-sharding-strategy optim_grads_params --context-parallel-size 2"),
    "pp": (4, "--data-parallel-sharding-strategy optim_grads --pipeline-model-parallel-size 2"),
    "ep": (4, f"--data-parallel-sharding-strategy optim_grads_params --expert-model-parallel-size 2 {_MOE}"),
    "fp8": (2, ""),
    "muon": (2, "--data-parallel-sharding-strategy optim_grads_params --optimizer muon"),
}

# FP8 layers need a GPU; weights in bytes do not. Run by each checkout with the stand-in layers of its tests.
_FP8 = """
import hashlib, torch, torch.distributed as dist
from megatron.core.distributed.fsdp import FlatAdamW, MixedPrecisionPolicy
from tests.support.float8_weights import make_codec, make_fp8_net
from tests.support.fp8_training import shard, train_own_batches

dist.init_process_group("gloo")
for scaling in ("tensorwise", "delayed", "blockwise"):
    policy = MixedPrecisionPolicy(grad_comm_dtype=torch.float32)
    net = shard(make_fp8_net(make_codec(scaling)), "optim_grads_params", mixed_precision_policy=policy)
    losses = train_own_batches(net, FlatAdamW(net.parameters(), lr=1e-2), range(6))
    values = [*losses, *(parameter.full_tensor() for parameter in net.parameters())]
    hashed = hashlib.sha256(b"".join(value.detach().float().numpy().tobytes() for value in values)).hexdigest()
    if dist.get_rank() == 0:
        print(f"exact loss: {scaling}={losses[-1].item()!r},{hashed}")
dist.destroy_process_group()
"""


def digest(folder: Path) -> dict[str, str]:
    """Return a hash of each tensor of the latest checkpoint in a folder, by its name."""
    (checkpoint,) = folder.glob("iter_*")
    with tempfile.TemporaryDirectory() as scratch:
        dcp_to_torch_save(checkpoint, f"{scratch}/whole.pt")
        loaded = torch.load(f"{scratch}/whole.pt", map_location="cpu", weights_only=False)
    hashes: dict[str, str] = {}

    def visit(value: object, name: str) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                visit(item, f"{name}.{key}")
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                visit(item, f"{name}.{index}")
        elif isinstance(value, torch.Tensor):
            raw = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            hashes[name] = hashlib.sha256(f"{value.dtype} {tuple(value.shape)}".encode() + raw).hexdigest()

    visit(loaded, "")
    return hashes


def run(checkout: Path, ranks: int, flags: str, python: str) -> tuple[list[str], dict[str, str], str]:
    """Train in a checkout; return losses and norms as they are logged, the checkpoint's hashes, and the output.

    Without flags it is the program with weights in bytes, which saves no checkpoint: it logs a hash of its weights.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        if flags:
            command += ["pretrain_gpt.py", *_COMMON.split(), *flags.split(), "--save", folder, "--save-interval", "4"]
        else:
            (Path(folder) / "fp8.py").write_text(_FP8)
            command.append(f"{folder}/fp8.py")
        environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
        output = done.stdout + done.stderr
        if done.returncode:
            return [], {}, output
        logged = re.findall(r"(?:lm loss|grad norm|exact loss|exact norm): (\S+)", output)
        return logged, digest(Path(folder)) if flags else {}, output


def main() -> int:
    """Compare the checkouts and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--lines", nargs="*", default=list(LINES), choices=LINES)
    asked = parser.parse_args()
    differs = False
    for name in asked.lines:
        (old_log, old, old_output), (new_log, new, new_output) = (
            run(checkout.resolve(), *LINES[name], asked.python) for checkout in (asked.old, asked.new)
        )
        if not old_log or not new_log:
            print(f"{name:20} did not run: {(new_output if old_log else old_output)[-1500:]}")
            differs = True
            continue
        other = sorted(key for key in {*old, *new} if old.get(key) != new.get(key))
        is_equal = not other and old_log == new_log and len(new_log) > 2
        print(
            f"{name:20} {'equal' if is_equal else 'DIFFERS'}: {len(new)} tensors, logged {' '.join(new_log[-2:])} {other[:3]}",
            flush=True,
        )
        differs |= not is_equal
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
