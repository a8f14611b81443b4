"""The cheapest splits of a model over a number of devices: which fit into memory, and how fast each is."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from megatron.training.arguments import Settings, check_command_line
from megatron.training.planner.plan import plan_run
from megatron.training.planner.rates import DeviceRates

# Layers of each stage of the two smaller models from which a split's plan is drawn out: a layer costs what the other ones do.
_FEW, _MORE = 2, 3
_LONG = 32768  # sequences from here on are worth cutting
_MICRO_BATCHES = (1, 2, 4)
_RECOMPUTED = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
_WITH_VALUE = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
    "--expert-model-parallel-size",
    "--micro-batch-size",
    "--data-parallel-sharding-strategy",
    "--num-distributed-optimizer-instances",
    "--outer-dp-sharding-strategy",
    "--recompute-granularity",
    "--recompute-method",
    "--recompute-num-layers",
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
    "--pipeline-model-parallel-layout",
)
_WITHOUT_VALUE = ("--sequence-parallel", "--recompute-activations")


_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class Split:
    """One way to split a model, and what is recomputed."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    experts: int = 1
    micro_batch: int = 1
    strategy: str = "optim_grads_params"
    instances: int = 1
    recomputes: bool = False

    def flags(self) -> list[str]:
        """Return the flags of this split."""
        sizes = {
            "--tensor-model-parallel-size": self.tensor,
            "--pipeline-model-parallel-size": self.pipeline,
            "--context-parallel-size": self.context,
            "--expert-model-parallel-size": self.experts,
            "--micro-batch-size": self.micro_batch,
            "--num-distributed-optimizer-instances": self.instances,
        }
        flags = [word for name, size in sizes.items() for word in (name, str(size))]
        flags += ["--data-parallel-sharding-strategy", self.strategy]
        if self.tensor > 1:
            flags.append("--sequence-parallel")
        return flags + list(_RECOMPUTED) * self.recomputes


@dataclass(frozen=True, kw_only=True)
class Found:
    """A split that was planned.

    Attributes:
        device_nbytes: of the fullest device.
        is_exact: the whole model was planned, not smaller ones that it was drawn out from.
    """

    split: Split
    step_seconds: float
    device_nbytes: int
    tokens_per_second: float
    is_exact: bool = False


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What is searched for.

    Attributes:
        flags: of the launch line; those of the split are replaced.
        world_size: number of devices.
        vocab_size: of the tokenizer.
    """

    flags: tuple[str, ...]
    world_size: int
    vocab_size: int
    rates: DeviceRates

    def settings(self, split: Split, num_layers: int | None = None) -> Settings | None:
        """Return the settings of a run with this split; None where they are refused."""
        layers = [] if num_layers is None else ["--num-layers", str(num_layers)]
        flags = [*without_split(self.flags), *split.flags(), *layers]
        return check_command_line(flags, world_size=self.world_size, paths_exist=False).settings


def without_split(flags: Sequence[str]) -> list[str]:
    """Return the flags without those that say how the model is split."""
    left, words = [], iter(flags)
    for word in words:
        name = word.partition("=")[0]
        if name in _WITH_VALUE:
            if name == word:
                next(words, None)
        elif name not in _WITHOUT_VALUE:
            left.append(word)
    return left


def search(
    wish: Wish, *, num_best: int = 12, num_varied: int = 4, num_exact: int = 2, workers: int | None = None
) -> list[Found]:
    """Return the fastest splits that fit, fastest first.

    Splits are planned by models of few layers, from which the whole one is drawn out; the best ones are planned whole.

    Args:
        num_best: how many are returned at most.
        num_varied: how many are tried with other strategies than full sharding.
        num_exact: how many of them are planned whole.
        workers: processes; None: as many as there are cores; 1: this one.

    Raises:
        ValueError: the launch line is refused whatever the split is.
    """
    degrees = list(_degrees(wish))
    if not degrees:
        line = check_command_line(wish.flags, world_size=wish.world_size, paths_exist=False)
        raise ValueError(
            "no split of this launch line would start: " + "; ".join(line.faults or ["sizes do not divide"])
        )
    found = [row for rows in _each(partial(_of_degrees, wish), degrees, workers) for row in rows]
    found.sort(key=lambda row: row.step_seconds)
    others = [split for row in found[:num_varied] for split in _other_strategies(wish, row.split)]
    found += [row for row in _each(partial(_drawn_out, wish), others, workers) if row is not None and _fits(row, wish)]
    found.sort(key=lambda row: row.step_seconds)
    exact = _each(partial(_exactly, wish), [row.split for row in found[:num_exact]], workers)
    kept = [row for row in exact if row is not None and _fits(row, wish)] + found[num_exact:]
    return sorted(kept, key=lambda row: row.step_seconds)[:num_best]


def _each(function: partial[_Result], values: Sequence[Split], workers: int | None) -> list[_Result]:
    workers = min(workers or os.cpu_count() or 1, len(values))
    if workers <= 1:
        return [function(value) for value in values]
    # Not forked: the caller may have threads.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_be_quiet) as pool:
        return list(pool.map(function, values))


def _be_quiet() -> None:
    logging.disable(logging.WARNING)
    os.environ["OMP_NUM_THREADS"] = "1"


def _fits(row: Found, wish: Wish) -> bool:
    return row.device_nbytes <= wish.rates.memory_nbytes


def _degrees(wish: Wish) -> Iterator[Split]:
    """Yield what divides the model and the devices, with the smallest micro batch."""
    base = wish.settings(Split())
    whole = base or check_command_line(wish.flags, world_size=wish.world_size, paths_exist=False).settings
    if whole is None:
        return
    config, length = whole.model.transformer, whole.data.seq_length
    num_layers, num_experts = config.num_layers, config.num_moe_experts or 1
    on_host = wish.rates.devices_of_host
    for tensor in _powers(min(on_host, wish.world_size)):
        for pipeline in _powers(8):
            if num_layers % pipeline or (config.hybrid_layer_pattern is not None and pipeline > 1):
                continue
            for context in _powers(8 if length >= _LONG else 1):
                for experts in _powers(min(num_experts, 64)):
                    split = Split(tensor=tensor, pipeline=pipeline, context=context, experts=experts)
                    if tensor * pipeline * context <= wish.world_size and wish.settings(split) is not None:
                        yield split


def _powers(most: int) -> Iterator[int]:
    size = 1
    while size <= most:
        yield size
        size *= 2


def _of_degrees(wish: Wish, degrees: Split) -> list[Found]:
    """Plan a split with growing micro batches, as long as these fit and are faster; return those that fit."""
    rows: list[Found] = []
    for micro_batch in _MICRO_BATCHES:
        split = replace(degrees, micro_batch=micro_batch)
        row = _drawn_out(wish, split)
        is_last = row is not None and not _fits(row, wish)
        if is_last:
            row = _drawn_out(wish, replace(split, recomputes=True))
        if row is None or not _fits(row, wish):
            break
        rows.append(row)
        if is_last or (len(rows) > 1 and row.step_seconds >= rows[-2].step_seconds):
            break
    return rows


def _other_strategies(wish: Wish, split: Split) -> list[Split]:
    """Return the split with weights sharded over one host, and with the optimizer's state alone sharded."""
    hosts = wish.world_size // wish.rates.devices_of_host
    replicas = [replace(split, instances=hosts)] if hosts > 1 else []
    return [*replicas, replace(split, strategy="optim")]


def _drawn_out(wish: Wish, split: Split) -> Found | None:
    """Plan two models of few layers, and draw out what each further layer takes; None where the split is refused."""
    whole = wish.settings(split)
    if whole is None:
        return None
    num_layers = whole.model.transformer.num_layers // split.pipeline
    if num_layers <= _MORE:
        return _exactly(wish, split)
    small = [wish.settings(split, count * split.pipeline) for count in (_FEW, _MORE)]
    if small[0] is None or small[1] is None:  # layers are named one by one
        return _exactly(wish, split)
    few, more = (
        plan_run(settings, wish.rates, vocab_size=wish.vocab_size, by_kind=False)
        for settings in small
        if settings is not None
    )
    further = (num_layers - _FEW) / (_MORE - _FEW)
    seconds = few.step_seconds + further * (more.step_seconds - few.step_seconds)
    nbytes = few.device_nbytes + further * (more.device_nbytes - few.device_nbytes)
    return _found(wish, whole, split, seconds, int(nbytes), is_exact=False)


def _exactly(wish: Wish, split: Split) -> Found | None:
    settings = wish.settings(split)
    if settings is None:
        return None
    plan = plan_run(settings, wish.rates, vocab_size=wish.vocab_size, by_kind=False)
    return _found(wish, settings, split, plan.step_seconds, plan.device_nbytes, is_exact=True)


def _found(wish: Wish, settings: Settings, split: Split, seconds: float, nbytes: int, *, is_exact: bool) -> Found:
    tokens = settings.batch.global_batch_size * settings.data.seq_length
    return Found(
        split=split,
        step_seconds=seconds,
        device_nbytes=nbytes,
        tokens_per_second=tokens / seconds / wish.world_size,
        is_exact=is_exact,
    )


def table(found: Sequence[Found]) -> str:
    """Format splits as a table."""
    names = {"optim_grads_params": "full", "optim_grads": "grads", "optim": "optim"}
    lines = [
        f"{'tp':>3}{'pp':>4}{'cp':>4}{'ep':>4}  {'sharding':<12}{'micro batch':>12}  {'recomputed':<12}{'GiB':>8}{'step, ms':>11}"
        f"{'tokens/s of a device':>22}"
    ]
    for row in found:
        split = row.split
        sharding = names[split.strategy] + (f" x {split.instances}" if split.instances > 1 else "")
        lines.append(
            f"{split.tensor:>3}{split.pipeline:>4}{split.context:>4}{split.experts:>4}  {sharding:<12}{split.micro_batch:>12}  "
            f"{'layers' if split.recomputes else 'nothing':<12}{row.device_nbytes / 2**30:>8.1f}{row.step_seconds * 1e3:>11.1f}"
            f"{row.tokens_per_second:>22.0f}{'' if row.is_exact else '  about'}"
        )
    return "\n".join(lines)
