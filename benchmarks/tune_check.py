"""The tuner beside settings that were chosen by hand: ``torchrun --nproc-per-node N benchmarks/tune_check.py FOLDER [NAME...]``.

For each case ``--fsdp-tune`` chooses; then the hand-chosen settings and the tuned ones train in turn, in the same processes.
FOLDER receives NAME.json, the tuner's file, and NAME.md: times, losses, and whether the tuned run's losses are to the bit those of
the launch line with the same transport, both with ``--deterministic-mode``. A case for two ranks that is named runs on one rank too, where
nothing travels. Without GPUs tiny models rehearse it.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

if __package__ in (None, ""):  # started as a file: what it imports lies above it
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

import pretrain_gpt
from benchmarks.measure.train_steps import TrainSteps
from megatron.core.extensions import why_missing
from megatron.training.arguments import check_command_line, parse_settings
from megatron.training.launch.distributed_init import DistributedConfig, initialize_distributed
from megatron.training.launch.pretrain import pretrain, set_up, training_step
from megatron.training.launch.rendezvous import meet
from megatron.training.tuner.tuned import tuned

_STEPS, _WARM_UP = 16, 7
_TURNS = 2
_TO_THE_BIT = ("--deterministic-mode", "--train-iters", "5")
_COMMON = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights "
    f"--attention-dropout 0 --hidden-dropout 0 --train-iters {_STEPS} --lr 1e-5 --lr-decay-style constant --clip-grad 1.0 --bf16 "
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --use-distributed-optimizer --overlap-grad-reduce "
    "--overlap-param-gather --init-model-with-meta-device --megatron-fsdp-grad-comm-dtype bf16 --use-precision-aware-optimizer "
    "--cross-entropy-loss-fusion --mock-data --tokenizer-type NullTokenizer --split 100,0,0 --eval-iters 0 --log-interval 1 "
    "--manual-gc --group-query-attention --vocab-size 32000 --micro-batch-size 1"
)
_7B = "--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --num-query-groups 8"
_1B = "--hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 16 --num-query-groups 8"
_MOE = (
    f"{_1B} --num-layers 8 --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 5632 --moe-aux-loss-coeff 0.01 "
    "--moe-grouped-gemm --moe-token-dispatcher-type alltoall"
)
_FP8 = "--transformer-impl transformer_engine --fp8-format hybrid --fp8-recipe delayed --fp8-param-gather"
_TINY = "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --num-query-groups 2"
_PEER, _NCCL = "--fsdp-transport peer_copy", "--fsdp-transport nccl --create-all-gather-group"
_GRAPH = "--cuda-graph-impl full_iteration"
_BY_HAND = {"nccl": _NCCL, "peer": _PEER, "peer-graph": f"{_PEER} {_GRAPH}"}
"""What the pages of benchmarks/results/ found best for one model or another."""
_BY_HAND_ALONE = {"graph": _GRAPH}
"""The same where one rank has the model to itself."""


@dataclass(frozen=True)
class Case:
    """A launch line; ``hand``: settings by name, each of which was the best one of some model."""

    flags: str
    hand: dict[str, str]
    ranks: int = 2
    length: int = 4096
    batch: int = 1


CASES = {
    "dense": Case(f"--num-layers 16 {_7B}", {**_BY_HAND, "peer-kept": f"{_PEER} --fsdp-memory-budget 0.12"}),
    "small": Case(f"--num-layers 22 {_1B}", _BY_HAND, length=2048),
    "moe": Case(_MOE, {"nccl": _NCCL, "peer": _PEER}),
    "moe-graph": Case(f"{_MOE} --moe-expert-rank-capacity-factor 2", _BY_HAND),
    "fp8": Case(f"--num-layers 12 {_7B} {_FP8}", _BY_HAND),
    "alone": Case(f"--num-layers 8 {_7B}", _BY_HAND_ALONE, ranks=1, batch=2),
}


def flags_of(case: Case, *, is_tiny: bool) -> list[str]:
    """Return the flags of pretrain_gpt.py, without those that are chosen."""
    length = 64 if is_tiny else case.length
    layers = "" if "--transformer-impl" in case.flags else "--transformer-impl local"
    flags = f"{_COMMON} {layers} {case.flags} --global-batch-size {case.ranks * case.batch}"
    flags += f" --micro-batch-size {case.batch} --seq-length {length} --max-position-embeddings {length}"
    if is_tiny:
        flags += f" {_TINY} --vocab-size 256 --distributed-backend gloo"
        flags += " --moe-ffn-hidden-size 64" if "--num-experts" in flags else ""
    return flags.split()


@dataclass
class _Run:
    """The steps of a run: milliseconds between their ends on the device, and losses."""

    ms: list[float]
    losses: list[float]
    peak_gib: float

    @property
    def median_ms(self) -> float:
        return statistics.median(self.ms[_WARM_UP:])


def _run_of(steps: TrainSteps, device: torch.device) -> _Run:
    """Return what was seen, times of the slowest rank. Ranks: all."""
    slowest = torch.tensor(steps.milliseconds(), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    sums = torch.stack([record.loss_and_tokens for record in steps.records])
    dist.all_reduce(sums)
    peak = torch.cuda.max_memory_reserved() / 2**30 if device.type == "cuda" else 0.0
    return _Run(slowest.tolist(), (sums[:, 0] / sums[:, 1]).tolist(), peak)


def _train(flags: Sequence[str], device: torch.device) -> _Run:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with TrainSteps(device.type == "cuda", profiled=-1) as steps:
        pretrain(
            parse_settings(flags),
            model_provider=pretrain_gpt.model_provider,
            datasets_provider=pretrain_gpt.datasets_provider,
            forward_step=pretrain_gpt.forward_step,
        )
        return _run_of(steps, device)


def _tune(flags: Sequence[str], file: Path, seconds: float) -> list[str]:
    """Return the flags that the tuner chooses. Ranks: all."""
    settings = parse_settings([*flags, "--fsdp-tune", str(file), "--fsdp-tune-seconds", str(seconds)])
    found = tuned(
        settings,
        meet(settings.distributed.timeout),
        set_up=set_up,
        make_step=training_step,
        model_provider=pretrain_gpt.model_provider,
        datasets_provider=pretrain_gpt.datasets_provider,
        forward_step=pretrain_gpt.forward_step,
    )
    words = list(found.launch_line.words)
    return words[len(settings.launch_line.words) :]


def check(name: str, case: Case, folder: Path, device: torch.device, seconds: float) -> str:
    """Tune a case and train it by hand and as tuned; return the page. Ranks: all."""
    flags = flags_of(case, is_tiny=device.type != "cuda")
    file = folder / f"{name}.json"
    began = time.perf_counter()
    chosen = _tune(flags, file, seconds)
    tuning_s = time.perf_counter() - began
    transport = chosen[chosen.index("--fsdp-transport") + 1] if "--fsdp-transport" in chosen else None
    plain = [] if transport is None else ["--fsdp-transport", transport]
    hand = {key: words.split() for key, words in case.hand.items()}
    if device.type != "cuda":  # there a budget is in bytes
        hand = {key: ["100000" if word == "0.12" else word for word in words] for key, words in hand.items()}
    candidates = {"as launched": plain, **hand, "tuned": chosen}
    served = {key: words for key, words in candidates.items() if not check_command_line([*flags, *words]).faults}
    runs: dict[str, list[_Run]] = {key: [] for key in served}
    for turn in range(_TURNS):
        for key in list(served)[:: 1 if turn % 2 == 0 else -1]:
            runs[key].append(_train([*flags, *served[key]], device))
    launched, tuned_losses = (_train([*flags, *words, *_TO_THE_BIT], device).losses for words in (plain, chosen))
    torch.use_deterministic_algorithms(False)  # the next case is timed
    return _page(name, runs, served, tuning_s, alike=launched == tuned_losses)


def _page(name: str, runs: dict[str, list[_Run]], served: dict[str, list[str]], tuning_s: float, *, alike: bool) -> str:
    ms = {key: statistics.mean(run.median_ms for run in own) for key, own in runs.items()}
    by_hand = min((key for key in ms if key != "tuned"), key=lambda key: ms[key])
    rows = [
        f"| {key} | {ms[key]:.2f} | {', '.join(f'{run.median_ms:.2f}' for run in own)} | {own[-1].peak_gib:.2f} | "
        f"{own[0].losses[-1]:.6f} | `{' '.join(served[key])}` |"
        for key, own in runs.items()
    ]
    return "\n".join(
        (
            f"# {name}",
            "",
            f"Tuned in {tuning_s:.0f} s. Best by hand: {by_hand}, {ms[by_hand]:.2f} ms; tuned {ms['tuned']:.2f} ms, "
            f"{ms['tuned'] / ms[by_hand]:.3f} of it. Losses of the tuned run are those of the launch line with its transport, to the "
            f"bit: {'yes' if alike else 'NO'}.",
            "",
            "| settings | ms a step | of each turn | GiB reserved | last loss | flags |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
        )
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Check the cases of this number of ranks; return 1 if the tuned losses of one of them differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CASES)}; none: all of this number of ranks")
    parser.add_argument("--seconds", type=float, default=100.0, help="of the tuner, for each case (default: 100)")
    options = parser.parse_args(argv)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # before cuBLAS makes its first handle
    device = initialize_distributed(DistributedConfig())
    options.folder.mkdir(parents=True, exist_ok=True)
    differs = False
    for name, case in CASES.items():
        if options.names and name not in options.names:
            continue
        if case.ranks != dist.get_world_size():
            if not options.names or dist.get_world_size() > 1:
                continue
            case = replace(case, ranks=1, hand=_BY_HAND_ALONE)
        if _FP8 in case.flags and (device.type != "cuda" or why_missing("transformer_engine_layers") is not None):
            continue
        page = check(name, case, options.folder, device, options.seconds)
        differs = differs or ": NO." in page
        if dist.get_rank() == 0:
            (options.folder / f"{name}.md").write_text(page)
            print(page, flush=True)
    dist.destroy_process_group()
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
