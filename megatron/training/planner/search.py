"""The cheapest splits of a model over a number of devices: which fit into memory, and how fast each is."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch

from megatron.core.child_process import end_with_parent
from megatron.training.arguments import Settings, check_command_line
from megatron.training.planner.few_layers import few_layers
from megatron.training.planner.plan import RunPlan, plan_run
from megatron.training.planner.rank import Care
from megatron.training.planner.rates import DeviceRates

_SURELY = 1.1  # where a rough plan takes so much of the memory, a careful one would not fit either
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
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
)
_WITHOUT_VALUE = (
    "--sequence-parallel",
    "--recompute-activations",
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
)

_Each = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]


@dataclass(frozen=True, kw_only=True)
class Split:
    """One way to split a model, and what is recomputed.

    Attributes:
        tensor, pipeline, context, experts: ranks that share matrices, layers, sequences and experts.
        last_stage: layers of the last pipeline stage, where it has fewer than the others.
        micro_batch: samples of a microbatch.
        strategy, instances: what is sharded, and over how many replicas.
        recomputes: backward computes each layer's forward again.
    """

    tensor: int = 1
    pipeline: int = 1
    last_stage: int | None = None
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
        if self.last_stage is not None:
            flags += ["--decoder-last-pipeline-num-layers", str(self.last_stage)]
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
        rates: of the device.
    """

    flags: tuple[str, ...]
    world_size: int
    vocab_size: int
    rates: DeviceRates

    def settings(self, split: Split, layers: Sequence[str] = ()) -> Settings | None:
        """Return the settings of a run with this split, or of a smaller model with these layers; None where they are refused."""
        if layers:
            split = replace(split, last_stage=None)
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
    wish: Wish, *, num_best: int = 12, num_varied: int = 2, num_exact: int = 2, workers: int | None = None
) -> list[Found]:
    """Return the fastest splits that fit, fastest first.

    Splits are planned by models of few layers, from which the whole one is drawn out: first all of them roughly, with as few pipeline
    stages as may be; then, in the order of their times, as many as are wanted; the best ones are planned whole.

    Args:
        num_best: how many are returned at most.
        num_varied: how many are tried with other strategies than full sharding.
        num_exact: how many of them are planned whole.
        workers: processes; None: as many as there are cores; 1: this one.

    Raises:
        ValueError: the launch line is refused whatever the split is.

    Ranks: one process alone, without process groups; blocks.
    """
    families = _families(wish)
    if not families:
        line = check_command_line(wish.flags, world_size=wish.world_size, paths_exist=False)
        raise ValueError(
            "no split of this launch line would start: " + "; ".join(line.faults or ["sizes do not divide"])
        )
    with _each_by(workers or os.cpu_count() or 1) as each:
        rough = sorted((row for rows in each(partial(_of_families, wish), families) for row in rows), key=_seconds)
        found: dict[Split, Found] = {}
        for at in range(0, len(rough), num_best):
            rows = each(partial(_that_fits, wish), [row.split for row in rough[at : at + num_best]])
            found |= {row.split: row for row in rows if row is not None}
            if len(found) >= num_best:
                break
        others = [split for row in _fastest(found)[:num_varied] for split in _other_strategies(wish, row.split)]
        rows = each(partial(_drawn_out, wish), others)
        found |= {row.split: row for row in rows if row is not None and _fits(row, wish)}
        best = [row.split for row in _fastest(found)[:num_exact]]
        for split, row in zip(best, each(partial(_exactly, wish), best), strict=True):
            del found[split]
            if row is not None and _fits(row, wish):
                found[split] = row
    return _fastest(found)[:num_best]


def _seconds(row: Found) -> float:
    return row.step_seconds


def _fastest(found: Mapping[Split, Found]) -> list[Found]:
    return sorted(found.values(), key=_seconds)


@contextmanager
def _each_by(workers: int) -> Iterator[_Each]:
    """Yield what calls a function with each of some values, in so many processes."""
    if workers == 1:
        yield lambda function, values: [function(value) for value in values]
        return
    # Not forked: the caller may have threads.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_be_quiet) as pool:
        yield lambda function, values: list(pool.map(function, values))


def _be_quiet() -> None:
    end_with_parent()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)  # torch has read OMP_NUM_THREADS before this runs


def _fits(row: Found, wish: Wish) -> bool:
    return row.device_nbytes <= wish.rates.memory_nbytes


def _families(wish: Wish) -> list[list[list[Split]]]:
    """Return what divides the model and the devices: by tensor and context parallelism, by expert parallelism, and by pipeline stages."""
    base = wish.settings(Split())
    whole = base or check_command_line(wish.flags, world_size=wish.world_size, paths_exist=False).settings
    if whole is None:
        return []
    config, length = whole.model.transformer, whole.data.seq_length
    num_layers, num_experts = config.num_layers, config.num_moe_experts or 1
    stages = {size: _last_stage(num_layers, size) for size in _powers(8 if config.hybrid_layer_pattern is None else 1)}
    families = []
    for tensor, context in product(
        _powers(min(wish.rates.devices_of_host, wish.world_size)), _powers(8 if length >= _LONG else 1)
    ):
        family = []
        for experts in _powers(min(num_experts, 64)):
            splits = [
                Split(tensor=tensor, pipeline=pipeline, last_stage=last, context=context, experts=experts)
                for pipeline, last in stages.items()
                if tensor * pipeline * context <= wish.world_size
            ]
            if lawful := [split for split in splits if wish.settings(split) is not None]:
                family.append(lawful)
        if family:
            families.append(family)
    return families


def _last_stage(num_layers: int, stages: int) -> int | None:
    """Return the layers of the last stage, which also has the loss, where they cannot be shared out evenly; others have one more at least.

    None also where too few are left for it: that split is refused.
    """
    left = num_layers - math.ceil(num_layers / stages) * (stages - 1)
    return left if num_layers % stages and left > 0 else None


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def _of_families(wish: Wish, families: Sequence[Sequence[Split]]) -> list[Found]:
    """Plan splits that differ in expert parallelism roughly, from the largest on, until two in a row are slower than one before."""
    found: list[Found] = []
    fastest, num_slower = math.inf, 0
    for family in reversed(families):
        rows = _of_family(wish, family)
        found += rows
        before, fastest = fastest, min([fastest, *map(_seconds, rows)])
        num_slower = num_slower + 1 if rows and fastest == before else 0
        if num_slower == 2:
            break
    return found


def _of_family(wish: Wish, family: Sequence[Split]) -> list[Found]:
    """Plan splits that differ in pipeline stages roughly, with growing micro batches as long as these fit and are faster.

    The one with fewest stages is planned. With more of them each has less to do in as many more microbatches, so their time differs in
    the pipeline's bubble, and a first stage keeps as much: fewer layers of more microbatches.
    """
    found: list[Found] = []
    fastest = math.inf
    for micro_batch in _MICRO_BATCHES:
        lawful = [replace(split, micro_batch=micro_batch) for split in family]
        lawful = [split for split in lawful if wish.settings(split) is not None]
        drawn = _draw_out(wish, lawful[0], Care.ROUGH) if lawful else None
        if drawn is None:
            continue
        recomputes = drawn.device_nbytes > _SURELY * wish.rates.memory_nbytes
        whole = drawn.microbatch_seconds * lawful[0].pipeline
        without_bubble = drawn.step_seconds - drawn.bubble_seconds
        rows = [
            Found(
                split=replace(split, recomputes=recomputes),
                step_seconds=(without_bubble + whole * (1 - 1 / split.pipeline)) * (4 / 3 if recomputes else 1),
                device_nbytes=drawn.device_nbytes,
                tokens_per_second=0.0,
            )
            for split in lawful
        ]
        found += rows
        before, fastest = fastest, min(fastest, *map(_seconds, rows))
        if recomputes or fastest == before:
            break
    return found


def _that_fits(wish: Wish, split: Split) -> Found | None:
    """Plan a split, with recomputation if it does not fit otherwise; None where it does not fit at all."""
    row = _drawn_out(wish, split)
    if row is not None and not _fits(row, wish) and not split.recomputes:
        row = _drawn_out(wish, replace(split, recomputes=True))
    return row if row is not None and _fits(row, wish) else None


def _other_strategies(wish: Wish, split: Split) -> list[Split]:
    """Return the split with weights sharded over one host, and with the optimizer's state alone sharded."""
    hosts = wish.world_size // wish.rates.devices_of_host
    replicas = [replace(split, instances=hosts)] if hosts > 1 else []
    return [*replicas, replace(split, strategy="optim")]


@dataclass(frozen=True, kw_only=True)
class _Drawn:
    """What a plan says of a whole model."""

    step_seconds: float
    microbatch_seconds: float
    bubble_seconds: float
    device_nbytes: int
    is_exact: bool


def _draw_out(wish: Wish, split: Split, care: Care) -> _Drawn | None:
    """Plan two models of few layers, and draw out what each further layer takes; None where the split is refused."""
    whole = wish.settings(split)
    if whole is None:
        return None
    layers = few_layers(whole.model.transformer, split.pipeline)
    small = [] if layers is None else [wish.settings(split, flags) for flags in (layers.few, layers.more)]
    if layers is None or None in small:
        small = [whole]
    try:
        plans = [plan_run(one, wish.rates, vocab_size=wish.vocab_size, care=care) for one in small if one is not None]
    except MemoryError:  # no room for single tensors of it, which is so where the split is far too small for the model
        return None

    def drawn(figure: Callable[[RunPlan], float]) -> float:
        few, more = figure(plans[0]), figure(plans[-1])
        return few if layers is None else few + layers.further * (more - few)

    return _Drawn(
        step_seconds=drawn(lambda plan: plan.step_seconds),
        microbatch_seconds=drawn(lambda plan: plan.microbatch_seconds),
        bubble_seconds=drawn(lambda plan: plan.bubble_seconds),
        device_nbytes=int(drawn(lambda plan: plan.device_nbytes)),
        is_exact=len(plans) == 1,
    )


def _drawn_out(wish: Wish, split: Split) -> Found | None:
    drawn = _draw_out(wish, split, Care.STEADY)
    return None if drawn is None else _found(wish, split, drawn)


def _exactly(wish: Wish, split: Split) -> Found | None:
    settings = wish.settings(split)
    if settings is None:
        return None
    plan = plan_run(settings, wish.rates, vocab_size=wish.vocab_size, care=Care.STEADY)
    drawn = _Drawn(
        step_seconds=plan.step_seconds,
        microbatch_seconds=plan.microbatch_seconds,
        bubble_seconds=plan.bubble_seconds,
        device_nbytes=plan.device_nbytes,
        is_exact=True,
    )
    return _found(wish, split, drawn)


def _found(wish: Wish, split: Split, drawn: _Drawn) -> Found:
    settings = wish.settings(split)
    assert settings is not None, "it was planned"
    tokens = settings.batch.global_batch_size * settings.data.seq_length
    return Found(
        split=split,
        step_seconds=drawn.step_seconds,
        device_nbytes=drawn.device_nbytes,
        tokens_per_second=tokens / drawn.step_seconds / wish.world_size,
        is_exact=drawn.is_exact,
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
            f"{'' if split.last_stage is None else f'  last stage: {split.last_stage} layers'}"
        )
    return "\n".join(lines)
