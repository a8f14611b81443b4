"""Tell whether two versions of the code give bitwise equal losses, gradient norms and checkpoints.

    python benchmarks/same_numbers.py record CHECKOUT OUT.json [NAME ...]   trains, and writes what came out
    python benchmarks/same_numbers.py compare A.json B.json [NAME ...]      says what differs, and exits with 1 if so

``record`` starts the pretrain_gpt.py of CHECKOUT (the root of a clone) with each launch line of ``LINES``, or with those
named. A line runs on GPUs where there are as many as it has ranks, else on CPUs; records of different devices, flags or
versions of torch count as different.

A record holds, for each line, every scalar that the run logs for each iteration (losses, gradient norm, learning rate)
as the Python float that TensorBoard's writer is given, unrounded; and a description of each entry of the checkpoint that
the run saves at its end, read back through torch.distributed.checkpoint alone: shape, dtype and a digest of the bytes of
weights and optimizer state, and plain values. How the checkpoint is cut into files is not looked at. The parts of this
script that record and compare import nothing of megatron, and neither version is edited.
"""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

ITERATIONS = 6
MUST_BE_LOGGED = ("lm loss", "grad-norm")
_LIMIT_S, _GRACE_S = 900.0, 60.0
_TAIL = 150
_NUM_NAMED = 5
_LONGEST_PLAIN = 300

# ffn-hidden-size: not divisible by 4, so that ranks hold different numbers of rows. The learning rate stays above 0, so
# that the last gradient reaches the checkpoint. The norm is above clip-grad, so that clipping is seen.
_COMMON = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 70 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 --init-method-std 0.1 --make-vocab-size-divisible-by 8 --mock-data "
    f"--tokenizer-type NullTokenizer --vocab-size 62 --num-workers 0 --train-iters {ITERATIONS} --micro-batch-size 2 "
    "--lr 1e-2 --lr-warmup-iters 2 --min-lr 1e-3 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 0.5 "
    "--eval-iters 0 --log-interval 1 --distributed-timeout-minutes 5 --use-megatron-fsdp"
)
_ON_DEVICE = {
    "cpu": "--distributed-backend gloo",
    # Only kernels that add in a fixed order, and no transport that a stopwatch chose.
    "cuda": ("--distributed-backend nccl --deterministic-mode --attention-backend unfused --fsdp-transport nccl"),
}
_LLAMA = (
    "--untie-embeddings-and-output-weights --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --group-query-attention --num-query-groups 2"
)
_EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --disable-bias-linear --swiglu "
    "--normalization RMSNorm --moe-aux-loss-coeff 0.05 --moe-z-loss-coeff 0.01 --moe-shared-expert-intermediate-size 16 "
    "--moe-token-dispatcher-type alltoall --expert-model-parallel-size 2"
)
_OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
_FULL = "--data-parallel-sharding-strategy optim_grads_params"
_EVALUATE = "--eval-iters 1 --eval-interval 3"
_TWO_INSTANCES = "--num-distributed-optimizer-instances 2"


@dataclass(frozen=True)
class Line:
    """Hold a launch line: the number of ranks, and the flags that it adds to the common ones."""

    ranks: int
    flags: str
    needs_cuda: bool = False


LINES = {
    "no_shard": Line(2, f"--data-parallel-sharding-strategy no_shard --global-batch-size 4 {_EVALUATE}"),
    "optim": Line(2, "--data-parallel-sharding-strategy optim --global-batch-size 4"),
    "optim_grads": Line(2, "--data-parallel-sharding-strategy optim_grads --global-batch-size 8"),
    "optim_grads_params": Line(
        2, f"{_FULL} {_OVERLAP} --global-batch-size 12 {_EVALUATE} --log-params-norm --log-num-zeros-in-grad"
    ),
    "tensor_parallel": Line(
        4, f"{_FULL} {_LLAMA} --global-batch-size 8 --tensor-model-parallel-size 2 --sequence-parallel"
    ),
    "context_parallel": Line(2, f"{_FULL} --global-batch-size 4 --context-parallel-size 2 --attention-dropout 0"),
    "pipeline": Line(4, f"{_FULL} {_OVERLAP} --global-batch-size 8 --pipeline-model-parallel-size 2"),
    "experts": Line(4, f"{_FULL} {_EXPERTS} --global-batch-size 16"),
    "hsdp": Line(4, f"{_FULL} {_TWO_INSTANCES} --outer-dp-sharding-strategy no_shard --global-batch-size 16"),
    "hfsdp": Line(4, f"{_FULL} {_OVERLAP} {_TWO_INSTANCES} --outer-dp-sharding-strategy optim --global-batch-size 16"),
    "bf16_peer_copy": Line(2, f"{_FULL} {_OVERLAP} {_LLAMA} --global-batch-size 8 --bf16 --fsdp-transport peer_copy"),
    "cuda_graph": Line(
        2, f"{_FULL} {_OVERLAP} --global-batch-size 8 --cuda-graph-impl full_iteration", needs_cuda=True
    ),
}


# ---- record: the process that starts the ranks


def record(checkout: Path, output: Path, names: Sequence[str]) -> int:
    """Write the record of a checkout; returns 1 if a line failed, which the record then says."""
    lines: dict[str, dict[str, Any]] = {}
    for name in names:
        started = time.monotonic()
        lines[name] = _result_of(checkout, LINES[name])
        print(f"{name:20} {_word_for(lines[name])}, {time.monotonic() - started:.0f} s", flush=True)
    about = {"checkout": str(checkout), "commit": _commit(checkout), "torch": torch.__version__}
    output.write_text(json.dumps({**about, "lines": lines}, indent=1) + "\n")
    return int(any("failed" in line for line in lines.values()))


def _word_for(line: Mapping[str, Any]) -> str:
    if "failed" in line:
        return f"FAILED: {line['failed']}"
    return f"skipped: {line['skipped']}" if "skipped" in line else f"recorded on {line['device']}"


def _result_of(checkout: Path, line: Line) -> dict[str, Any]:
    """Run a line; returns its part of the record."""
    device = "cuda" if torch.cuda.device_count() >= line.ranks else "cpu"
    if line.needs_cuda and device == "cpu":
        return {"skipped": f"it needs {line.ranks} CUDA devices, got {torch.cuda.device_count()}"}
    flags = f"{_COMMON} {_ON_DEVICE[device]} {line.flags}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            _launch(checkout, line.ranks, flags.split(), folder)
            scalars = _read_scalars(folder / "scalars")
            checkpoint = _read_checkpoint(folder / "checkpoints")
        except RuntimeError as error:
            return {"failed": str(error)}
    return {
        "device": device,
        "ranks": line.ranks,
        "flags": flags,
        "scalars": scalars,
        "checkpoint": checkpoint,
        "checkpoint_sha256": _sha256(json.dumps(checkpoint, sort_keys=True).encode()),
    }


def _launch(checkout: Path, ranks: int, flags: Sequence[str], folder: Path) -> None:
    """Run the ranks to their end, which leave scalars and checkpoints in the folder.

    Raises:
        RuntimeError: they failed or took too long; the tail of their output is printed.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [__file__, "rank", str(checkout), str(folder / "scalars"), *flags]
    command += ["--save", str(folder / "checkpoints"), "--tensorboard-dir", str(folder / "tensorboard")]
    # NVLink multicast must stay off on the machines that this was written for.
    settings = {"OMP_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    environment = {**os.environ, **settings, "PYTHONPATH": str(checkout), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    log = folder / "log"
    with log.open("wb") as stream:
        launcher = subprocess.Popen(command, cwd=checkout, env=environment, stdout=stream, stderr=subprocess.STDOUT)
        try:
            problem = f"exit status {launcher.returncode}" if launcher.wait(_LIMIT_S) else ""
        except subprocess.TimeoutExpired:
            problem = f"not done after {_LIMIT_S:.0f} s"
        finally:
            _end(launcher)
    if problem:
        print("\n".join(log.read_text(errors="replace").splitlines()[-_TAIL:]), flush=True)
        raise RuntimeError(problem)


def _end(launcher: subprocess.Popen[bytes]) -> None:
    """Stop the launcher if it still runs: asked politely, it ends its ranks, which are in sessions of their own."""
    if launcher.poll() is not None:
        return
    launcher.terminate()
    try:
        launcher.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()


def _read_scalars(path: Path) -> dict[str, dict[str, str]]:
    """Read what rank 0 logged: for each name and iteration the value, in hexadecimal, which rounds nothing.

    Raises:
        RuntimeError: the loss or the norm of an iteration is missing.
    """
    scalars: dict[str, dict[str, str]] = {}
    for text in path.read_text().splitlines() if path.exists() else ():
        name, iteration, value = json.loads(text)
        scalars.setdefault(name, {})[str(iteration)] = value
    for name in MUST_BE_LOGGED:
        missing = [i for i in range(1, ITERATIONS + 1) if str(i) not in scalars.get(name, {})]
        if missing:
            raise RuntimeError(f"{name} was not logged for the iterations {missing}")
    return scalars


def _read_checkpoint(folder: Path) -> dict[str, str]:
    """Describe each entry of the one checkpoint in the folder, by key, in the order of keys.

    Raises:
        RuntimeError: there is not one checkpoint.
    """
    found = [path.parent for path in folder.glob("*/.metadata")]
    if len(found) != 1:
        raise RuntimeError(f"the run must save one checkpoint, got {[path.name for path in found]}")
    reader = FileSystemReader(found[0])
    state: dict[str, Any] = {}
    for key, stored in sorted(reader.read_metadata().state_dict_metadata.items()):
        if isinstance(stored, TensorStorageMetadata):
            state[key] = torch.empty(stored.size, dtype=stored.properties.dtype)
        else:
            state[key] = b""  # load replaces it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it says that one process reads, which is so
        load(state, storage_reader=reader, no_dist=True)
    return {key: described(value) for key, value in state.items()}


def described(value: object) -> str:
    """Describe a tensor by dtype, shape and a digest of its bytes, and another value by itself or a digest."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().flatten()
        return f"{value.dtype} {list(value.shape)} {_sha256(flat.view(torch.uint8).numpy().tobytes())}"
    plain = _canonical(value)
    return plain if len(plain) <= _LONGEST_PLAIN else f"{type(value).__name__} {_sha256(plain.encode())}"


def _canonical(value: object) -> str:
    """Write a nest of plain values and tensors down so that equal ones give equal texts; dicts in the order of keys."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{_canonical(key)}: {_canonical(item)}" for key, item in value.items())) + "}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(map(_canonical, value))})"
    return described(value) if isinstance(value, torch.Tensor) else repr(value)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _commit(checkout: Path) -> str:
    """Name the commit of a checkout, and say whether tracked files differ from it."""
    git = ["git", "-C", str(checkout)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}, changed" if changed.stdout.strip() else head


# ---- rank: what torchrun starts


def train_as_rank(checkout: Path, scalars: Path, flags: Sequence[str]) -> None:
    """Train as one rank by the pretrain_gpt.py of the checkout; rank 0 appends what it logs to the file ``scalars``.

    Raises:
        RuntimeError: modules of megatron came from elsewhere than the checkout.
        SystemExit: the script ended with another status than 0.
    """
    _stand_in_for_tensorboard(scalars)
    script = checkout / "pretrain_gpt.py"
    sys.path[0], sys.argv = str(checkout), [str(script), *flags]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    files = [getattr(module, "__file__", None) for name, module in sys.modules.items() if name.startswith("megatron.")]
    strangers = [file for file in files if file and not Path(file).resolve().is_relative_to(checkout)]
    if strangers:
        raise RuntimeError(f"megatron must come from {checkout}, got {strangers[:_NUM_NAMED]}")


def _stand_in_for_tensorboard(path: Path) -> None:
    """Have the writer of TensorBoard append to a file: event files round to float32, and the package may be missing."""

    class SummaryWriter:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._stream = path.open("a")

        def add_scalar(self, tag: str, scalar_value: float, global_step: int, *args: Any, **kwargs: Any) -> None:
            if tag.endswith(" vs samples"):
                return  # the same values, which older checkouts do not write
            self._stream.write(json.dumps([tag, int(global_step), float(scalar_value).hex()]) + "\n")

        def flush(self) -> None:
            self._stream.flush()

        def close(self) -> None:
            self._stream.close()

    package, module = ModuleType("tensorboard"), ModuleType("torch.utils.tensorboard")
    package.__spec__ = ModuleSpec("tensorboard", None)  # so that importlib.util.find_spec finds it
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    sys.modules.update({"tensorboard": package, "torch.utils.tensorboard": module})


# ---- compare


def compare(a: Mapping[str, Any], b: Mapping[str, Any], names: Collection[str]) -> int:
    """Print one line for each launch line of either record, or of those named; returns 1 if anything differs."""
    differs = False
    for name in sorted({*a["lines"], *b["lines"], *names}, key=_place):
        if names and name not in names:
            continue
        found = _differences(a["lines"].get(name), b["lines"].get(name))
        if a["torch"] != b["torch"]:
            found.insert(0, f"torch {a['torch']} and {b['torch']}")
        differs |= bool(found)
        print(f"{name:20} {'DIFFERS: ' + '; '.join(found) if found else _sameness(a['lines'][name])}")
    return int(differs)


def _place(name: str) -> int:
    return list(LINES).index(name) if name in LINES else len(LINES)


def _sameness(line: Mapping[str, Any]) -> str:
    if "skipped" in line:
        return f"skipped in both: {line['skipped']}"
    count = sum(map(len, line["scalars"].values()))
    return f"same: {count} logged numbers, {len(line['checkpoint'])} entries of the checkpoint ({line['device']})"


def _differences(a: Mapping[str, Any] | None, b: Mapping[str, Any] | None) -> list[str]:
    """Say what differs between two results of a launch line; nothing if they are the same."""
    if a is None or b is None:
        return [f"not in {' and '.join(which for which, line in (('A', a), ('B', b)) if line is None)}"]
    failed = [f"failed in {which}: {line['failed']}" for which, line in (("A", a), ("B", b)) if "failed" in line]
    if failed:
        return failed
    if "skipped" in a or "skipped" in b:
        return [] if "skipped" in a and "skipped" in b else [f"skipped in {'A' if 'skipped' in a else 'B'} alone"]
    found = [f"{what}: {a[what]} and {b[what]}" for what in ("device", "ranks", "flags") if a[what] != b[what]]
    for name in sorted({*a["scalars"], *b["scalars"]}):
        found += _scalar_difference(name, a["scalars"].get(name, {}), b["scalars"].get(name, {}))
    return found + _entry_differences(a["checkpoint"], b["checkpoint"])


def _scalar_difference(name: str, a: Mapping[str, str], b: Mapping[str, str]) -> list[str]:
    iterations = sorted({*a, *b}, key=int)
    differing = [iteration for iteration in iterations if a.get(iteration) != b.get(iteration)]
    if not differing:
        return []
    values = (_number(of.get(differing[0])) for of in (a, b))
    return [f"{name} of {len(differing)} of {len(iterations)}, first at {differing[0]}: {' and '.join(values)}"]


def _number(value: str | None) -> str:
    return "nothing" if value is None else repr(float.fromhex(value))


def _entry_differences(a: Mapping[str, str], b: Mapping[str, str]) -> list[str]:
    found = []
    sides: tuple[tuple[str, Callable[[str], bool]], ...] = (
        ("in A alone", lambda key: key not in b),
        ("in B alone", lambda key: key not in a),
        ("changed", lambda key: key in a and key in b and a[key] != b[key]),
    )
    keys = sorted({*a, *b})
    for what, holds in sides:
        of_side = [key for key in keys if holds(key)]
        if of_side:
            more = ", ..." if len(of_side) > _NUM_NAMED else ""
            found.append(f"{len(of_side)} of {len(keys)} entries {what}: {', '.join(of_side[:_NUM_NAMED])}{more}")
    return found


def main(argv: Sequence[str]) -> int:
    """Do what the command line says; returns the exit status."""
    verb, *rest = argv or ["help"]
    if verb == "rank":
        train_as_rank(Path(rest[0]), Path(rest[1]), rest[2:])
        return 0
    unknown = [name for name in rest[2:] if name not in LINES]
    if verb not in ("record", "compare") or len(rest) < 2 or unknown:
        print(f"{__doc__}\nNAME: {' '.join(LINES)}", file=sys.stderr)
        return 2
    if verb == "record":
        return record(Path(rest[0]).resolve(), Path(rest[1]), rest[2:] or list(LINES))
    a, b = (json.loads(Path(path).read_text()) for path in rest[:2])
    return compare(a, b, rest[2:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
