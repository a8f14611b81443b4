"""Fine-tune Hugging Face models with PyTorch's FSDP2 and with this engine from one script, in turn, and compare.

Example::

    torchrun --nproc-per-node 2 benchmarks/finetune_hf.py --models llama-1b,qwen3-moe --tokens 1024,4096 --output page.md

needs ``pip install 'transformers>=5.17'``. The text are the sources of the Python standard library, byte by byte; the weights
are those of the seed, the same for all engines. Times are of whole steps: forward, backward, clipping, AdamW. The engines
run in ``--turns`` turns in the same processes, so that a slow moment of the machine does not fall on one alone. With one GPU,
``--share-gpu`` tells the memory of several ranks, to the byte of PyTorch's allocator.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

if __package__ in (None, ""):  # started as a file: what it imports lies beside and above it
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard

from benchmarks.measure.memory import MemoryWatch, use_expandable_segments
from benchmarks.measure.steps import GIB
from benchmarks.reports.page import facts_of_run, page
from examples.stdlib_corpus import read_modules
from megatron.core.distributed.fsdp import fully_shard_optimizer
from megatron.core.distributed.fsdp.fsdp2 import fully_shard
from megatron.core.distributed.fsdp.huggingface import fully_shard_pretrained

_SPECIAL_TOKENS = 3
_TINY = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_QWEN3 = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "norm_topk_prob": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-1b": (
        "Llama",
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            **_QWEN3,
            "vocab_size": 151936,
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 12,
            "num_experts": 64,
            "num_experts_per_tok": 8,
        },
    ),
    "qwen3-moe-small": (
        "Qwen3Moe",
        {
            "vocab_size": 32000,
            "hidden_size": 1024,
            "moe_intermediate_size": 384,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
        },
    ),
    "tiny-llama": ("Llama", {**_TINY, "tie_word_embeddings": True}),
    "tiny-qwen3-moe": ("Qwen3Moe", {**_TINY, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}),
}
"""Class of the model in ``transformers``, and the fields of its configuration; the first is Llama-3.2-1B's."""


@dataclass(kw_only=True)
class Run:
    """What an engine did in all its turns; memory is the most of any rank, in bytes."""

    losses: list[float] = field(default_factory=list)
    """Of the first turn, [steps], mean over ranks."""
    same_again: bool = True
    """Losses of later turns are those of the first, to the bit."""
    step_ms: list[float] = field(default_factory=list)
    """Of the slowest rank, each step between barriers."""
    host_ms: list[float] = field(default_factory=list)
    """Until the step's Python returned."""
    row_ms: list[float] = field(default_factory=list)
    """A step's share of several in a row, for each turn."""
    peak: int = 0
    """From the sharded model on: allocated by PyTorch's allocator and past it."""
    reserved: int = 0


class Fsdp2:
    """PyTorch's ``fully_shard`` on each layer, then on the model, and its fused AdamW."""

    description = "PyTorch's `fully_shard` and `AdamW(fused=True)`"

    def __init__(self, model: Any, mesh: DeviceMesh, policy: MixedPrecisionPolicy, rate: float) -> None:
        self.model = model
        for layer in model.model.layers:
            self.shard(layer, mesh=mesh, mp_policy=policy)
        self.shard(model, mesh=mesh, mp_policy=policy)
        self.optimizer: Any = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)

    shard: Callable[..., Any] = staticmethod(fsdp2_fully_shard)

    def scope(self, is_last: bool) -> Any:
        self.model.set_requires_gradient_sync(is_last)
        return nullcontext()

    def step(self, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        """Run one step over a list of microbatches; return its loss [] without waiting for the device."""
        losses = []
        for index, ids in enumerate(batch):
            with self.scope(index == len(batch) - 1):
                loss = self.model(input_ids=ids, labels=ids).loss / len(batch)
                loss.backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).sum()


class OursImport(Fsdp2):
    """The same calls, with the import changed."""

    description = "the same lines with `fully_shard` imported from this engine"
    shard = staticmethod(fully_shard)


class Ours(Fsdp2):
    """As docs/huggingface.md says: units found by the model, and the engine's own optimizer."""

    description = "`fully_shard_pretrained` and `fully_shard_optimizer(AdamW(fused=True))`"
    more: ClassVar[dict[str, Any]] = {}

    def __init__(self, model: Any, mesh: DeviceMesh, policy: MixedPrecisionPolicy, rate: float) -> None:
        self.model = fully_shard_pretrained(model, mesh=mesh, mp_policy=policy, **self.more)
        self.optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=rate, fused=True))


class OursArena(Ours):
    """With buffers that stay all the time, as without a policy of FSDP2's."""

    description = "the same with `least_memory=False`"
    more: ClassVar[dict[str, Any]] = {"least_memory": False}


class OursPeer(Ours):
    """With copy engines in NCCL's place."""

    description = '`ours` with `transport="peer_copy"`'
    more: ClassVar[dict[str, Any]] = {"transport": "peer_copy"}


ENGINES: dict[str, type[Fsdp2]] = {
    "fsdp2": Fsdp2,
    "ours-import": OursImport,
    "ours": Ours,
    "ours-arena": OursArena,
    "ours-peer": OursPeer,
}


def main(argv: Sequence[str]) -> int:
    """Run the settings that the arguments name; return 1 where losses differ by more than the tolerance.

    Ranks: all of the world; initialises the process group, unless there is one.
    """
    options = _parse(argv)
    device = torch.device("cpu")
    if options.share_gpu:
        os.environ["NCCL_HOSTID"] = f"rank {os.environ.get('RANK', '0')}"  # NCCL takes no device twice on one host
    if torch.cuda.is_available():
        use_expandable_segments()
        device = torch.device("cuda", 0 if options.share_gpu else int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    owns_group = not dist.is_initialized()
    if owns_group:
        dist.init_process_group("nccl", device_id=device) if device.type == "cuda" else dist.init_process_group("gloo")
    try:
        return _compare(options, device)
    finally:
        if owns_group:
            dist.destroy_process_group()


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="finetune_hf.py", description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="llama-1b,qwen3-moe", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--tokens", default="1024,4096", help="of a sample; each model runs with each of them")
    parser.add_argument("--engines", default="fsdp2,ours-import,ours", help=f"of {', '.join(ENGINES)}")
    parser.add_argument("--samples", type=int, default=1, help="of a microbatch on each rank")
    parser.add_argument("--microbatches", type=int, default=1, help="of a step")
    parser.add_argument("--steps", type=int, default=10, help="measured in a turn, once with waits and once in a row")
    parser.add_argument("--warmup", type=int, default=4, help="steps before them")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--reduce-dtype", choices=["float32", "bfloat16"], default="float32", help="of gradients")
    parser.add_argument("--recompute", action="store_true", help="the model's own gradient checkpointing")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--tolerance", type=float, default=0.01, help="between losses, relative")
    parser.add_argument(
        "--share-gpu", action="store_true", help="all ranks on one GPU: for memory by the allocator, not for times"
    )
    parser.add_argument("--output", type=Path, help="markdown page, written anew after each setting")
    options = parser.parse_args(argv)
    for name, known in (("models", MODELS), ("engines", ENGINES)):
        values = getattr(options, name).split(",")
        if not set(values) <= set(known):
            parser.error(f"--{name} must be of {', '.join(known)}, got {getattr(options, name)}")
        setattr(options, name, values)
    options.tokens = [int(length) for length in options.tokens.split(",")]
    return options


def _compare(options: argparse.Namespace, device: torch.device) -> int:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    text = _read_text(2_000_000)
    sections, faults = [], []
    for name in options.models:
        for length in options.tokens:
            batches = _batches(text, length, options, device)
            runs: dict[str, Run] = {engine: Run() for engine in options.engines}
            num_parameters = 0
            for _ in range(options.turns):
                for engine, run in runs.items():
                    num_parameters = _turn(engine, name, run, batches, mesh, options, device)
                    _say(f"{name}, {length} tokens, {engine}: {statistics.median(run.step_ms):.1f} ms")
            sections.append(_section(f"{name}, {num_parameters / 1e9:.2f} billion parameters, {length} tokens", runs))
            faults += _faults(f"{name}, {length} tokens", runs, options.tolerance)
            _publish(options, device, sections, faults)
    return 1 if faults else 0


def _read_text(max_nbytes: int) -> torch.Tensor:
    found = bytearray()
    for _, text in read_modules(Path(sysconfig.get_path("stdlib"))):
        found += text.encode()
        if len(found) >= max_nbytes:
            break
    return torch.frombuffer(found[:max_nbytes], dtype=torch.uint8).long() + _SPECIAL_TOKENS


def _batches(
    text: torch.Tensor, length: int, options: argparse.Namespace, device: torch.device
) -> list[list[torch.Tensor]]:
    """Return for each step its microbatches, [samples, length] ids of this rank each."""
    generator = torch.Generator().manual_seed(dist.get_rank())

    def sample() -> torch.Tensor:
        starts = torch.randint(len(text) - length, (options.samples,), generator=generator)
        return torch.stack([text[start : start + length] for start in starts.tolist()]).to(device)

    return [[sample() for _ in range(options.microbatches)] for _ in range(options.warmup + 2 * options.steps)]


def _turn(
    engine: str,
    name: str,
    run: Run,
    batches: Sequence[Sequence[torch.Tensor]],
    mesh: DeviceMesh,
    options: argparse.Namespace,
    device: torch.device,
) -> int:
    """Build a model and an engine, train, add what was measured to ``run``; return the model's parameters."""
    import transformers

    kind, fields = MODELS[name]
    memory = MemoryWatch(device, shares_device=options.share_gpu)
    config = getattr(transformers, f"{kind}Config")(max_position_embeddings=8192, use_cache=False, **fields)
    torch.manual_seed(1234)
    with device:
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    model.train()
    if options.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=getattr(torch, options.reduce_dtype))
    made = ENGINES[engine](model, mesh, policy, options.learning_rate)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    memory.begin_steady()  # without the whole model, which was there before it was sharded
    losses = []
    for batch in batches[: options.warmup + options.steps]:
        _wait(device)
        began = time.perf_counter()
        loss = made.step(batch)
        returned = time.perf_counter()
        _synchronize(device)
        ended = time.perf_counter()
        memory.note()
        losses.append(loss)
        if len(losses) > options.warmup:
            step_ms, host_ms = _most([(ended - began) * 1e3, (returned - began) * 1e3], device)
            run.step_ms.append(step_ms)
            run.host_ms.append(host_ms)
    _wait(device)
    began = time.perf_counter()
    losses += [made.step(batch) for batch in batches[options.warmup + options.steps :]]
    _synchronize(device)
    run.row_ms += _most([(time.perf_counter() - began) * 1e3 / options.steps], device)
    memory.note()
    means = torch.stack(losses).float()
    dist.all_reduce(means)
    found = (means / dist.get_world_size()).tolist()
    run.same_again &= run.losses in ([], found)
    run.losses = run.losses or found
    outside = memory.peak_outside
    peak, reserved = _most([memory.steady_allocated + outside, memory.steady_reserved + outside], device)
    run.peak, run.reserved = max(run.peak, int(peak)), max(run.reserved, int(reserved))
    return num_parameters


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        dist.barrier(device_ids=[device.index])
    else:
        dist.barrier()
    _synchronize(device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _most(values: Sequence[float], device: torch.device) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


def _section(title: str, runs: dict[str, Run]) -> str:
    first = next(iter(runs.values()))
    rows = [
        f"| {engine} | {statistics.median(run.step_ms):.1f} | {min(run.step_ms):.1f} | {statistics.median(run.host_ms):.1f} "
        f"| {statistics.fmean(run.row_ms):.1f} | {statistics.fmean(first.row_ms) / statistics.fmean(run.row_ms):.3f} "
        f"| {run.peak / GIB:.2f} | {run.reserved / GIB:.2f} | {run.losses[0]:.5f} | {run.losses[len(run.losses) // 2]:.5f} "
        f"| {run.losses[-1]:.5f} | {'yes' if run.same_again else 'no'} |"
        for engine, run in runs.items()
    ]
    header = [
        "engine", "median ms", "least ms", "host ms", "in a row ms", f"speed against {next(iter(runs))}", "peak GiB",
        "reserved GiB", "first loss", "middle", "last", "each turn the same losses",
    ]  # fmt: skip
    return "\n".join([f"## {title}", "", f"| {' | '.join(header)} |", "| --- " * len(header) + "|", *rows])


def _faults(title: str, runs: dict[str, Run], tolerance: float) -> list[str]:
    names = list(runs)
    faults = []
    for name in names[1:]:
        pairs = zip(runs[names[0]].losses, runs[name].losses, strict=True)
        worst = max(abs(ours - theirs) / theirs for theirs, ours in pairs)
        if not worst <= tolerance:
            faults.append(f"{title}: losses of {name} differ from {names[0]}'s by up to {worst:.2%}")
    return faults


def _publish(options: argparse.Namespace, device: torch.device, sections: Sequence[str], faults: Sequence[str]) -> None:
    import transformers

    facts = facts_of_run(device, [])
    recompute = ", gradient checkpointing" if options.recompute else ""
    facts += [
        ("transformers", transformers.__version__),
        (
            "step",
            f"{options.microbatches} x {options.samples} samples on each rank, bf16, gradients reduced in {options.reduce_dtype}, "
            f"clipped, AdamW on fp32 weights{recompute}",
        ),
        (
            "steps",
            f"{options.turns} turns of {options.warmup} to warm up, {options.steps} timed, {options.steps} in a row",
        ),
        *((f"`{name}`", ENGINES[name].description) for name in options.engines),
        ("losses", "; ".join(faults) or f"within {options.tolerance:.1%} of each other at each step"),
    ]
    text = page("Fine-tuning Hugging Face models", facts, sections)
    if dist.get_rank() == 0 and options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text)
    _say(sections[-1])


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
