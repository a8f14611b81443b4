"""The plan of a run as text."""

from __future__ import annotations

from collections import defaultdict

from megatron.training.planner.plan import RunPlan
from megatron.training.planner.rank import RankRecord

_GIB = 2**30
_BARS = "▁▂▃▄▅▆▇█"
# What the engine owns comes first, then what the model allocates in a step.
_ORDER = (
    "main weights",
    "model weights",
    "optimizer state",
    "gathered weights",
    "gradient staging",
    "main gradients",
    "partial gradients",
    "activations",
    "logits",
    "workspace of backward",
    "other",
)


def describe(plan: RunPlan) -> str:
    """Format a plan: what is planned otherwise than it runs, memory by kind in GiB, wires in GB, and time in ms."""
    grid, rates, config = plan.settings.grid, plan.rates, plan.settings.model.transformer
    split = ", ".join(
        f"{axis} {grid.size(axis)}" for axis in ("tp", "cp", "pp", "ep", "dp") if grid.size(axis) > 1 or axis == "dp"
    )
    lines = [f"plan for {grid.world_size} x {rates.name}: {split}, {plan.settings.ddp.data_parallel_sharding_strategy}"]
    if plan.settings.cuda_graph.enabled:
        lines[0] += ", each step one CUDA graph"
    if config.fp8_dot_product_attention:
        lines.append("attention in FP8 is planned as if it were in bf16")
    if config.use_transformer_engine_op_fuser:
        lines.append("the MLP's activation, which is written in FP8, is planned as if it were in bf16")
    lines += ["", *_memory(plan), "", *_wires(plan), "", *_time(plan)]
    return "\n".join(lines)


def _memory(plan: RunPlan) -> list[str]:
    rank = plan.fullest
    lines = [f"memory of rank {rank.rank}, GiB{'between steps':>27}{'at the peak':>14}"]
    for kind in _in_order(rank):
        rest, peak = rank.at_rest.get(kind, 0) / _GIB, rank.at_peak.get(kind, 0) / _GIB
        if max(rest, peak) >= 0.0005:
            lines.append(f"  {kind:<36}{rest:>11.3f}{peak:>14.3f}")
    work = plan.workspace_nbytes
    lines.append(f"  {'workspaces':<36}{work / _GIB:>11.3f}{work / _GIB:>14.3f}")
    rest, peak = (sum(rank.at_rest.values()) + work) / _GIB, (rank.peak_nbytes + work) / _GIB
    lines.append(f"  {'by the allocator':<36}{rest:>11.3f}{peak:>14.3f}")
    if rank.first_peak_nbytes > rank.peak_nbytes:
        first = (rank.first_peak_nbytes + work) / _GIB
        lines.append(f"  {'by it at start and in the first steps':<36}{'':>11}{first:>14.3f}")
    lines.append(f"  {'context, kernels, communicators':<36}{'':>11}{plan.rates.outside_nbytes / _GIB:>14.3f}")
    of = plan.rates.memory_nbytes / _GIB
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    lines.append(f"  {'the device':<36}{'':>11}{plan.device_nbytes / _GIB:>14.3f}  of {of:.1f}: {verdict}")
    lines.append(f"  {'over a step':<36}{_curve(rank)}")
    if rank.host_nbytes:
        lines.append(f"  {'in the memory of the host':<36}{rank.host_nbytes / _GIB:>11.3f}")
    lines.append(f"  {'padding':<36}{rank.padding:>11.2%}")
    return lines


def _curve(rank: RankRecord) -> str:
    """Draw the bytes over a step, from nothing to the peak, as a line of bars."""
    totals = [sum(sample.values()) for sample in rank.over_time]
    highest = max([*totals, rank.peak_nbytes, 1])
    return "".join(_BARS[min(total * len(_BARS) // highest, len(_BARS) - 1)] for total in totals)


def _in_order(rank: RankRecord) -> list[str]:
    kinds = {*rank.at_rest, *rank.at_peak}
    return [kind for kind in _ORDER if kind in kinds] + sorted(kinds - set(_ORDER))


def _wires(plan: RunPlan) -> list[str]:
    time, number = plan.slowest, plan.slowest_rank.num_microbatches
    note = "" if number == plan.settings.batch.num_microbatches else f" (of {number} microbatches)"
    lines = [f"on the wires in a step, GB of whole buffers{note}"]
    names = {"gather": "all-gathers of weights", "reduce": "reductions of gradients", "compute": "of the model's split"}
    by_wire: defaultdict[str, int] = defaultdict(int)
    for (stream, size), nbytes in time.nbytes.items():
        by_wire[f"{names.get(stream, stream)}, {size} ranks"] += nbytes
    lines += [f"  {wire:<36}{nbytes / 1e9:>11.3f}" for wire, nbytes in sorted(by_wire.items()) if nbytes >= 1e5]
    return lines if len(lines) > 1 else [*lines, "  nothing"]


def _time(plan: RunPlan) -> list[str]:
    """Say what the step consists of: the indented lines below a line add up to it."""
    time, run = plan.slowest, plan.slowest_rank.num_microbatches
    further = plan.settings.batch.num_microbatches - run
    parts = [
        (f"    {_microbatches(run)}, of it", time.total),
        ("      computation", time.compute),
        ("      what runs beside it costs", time.contention),
        ("      waiting for communication", time.exposed),
        ("      waiting for the host", time.host),
    ]
    if further:
        parts.append((f"    {_microbatches(further)} more", plan.further_seconds))
    if plan.bubble_seconds > 0:
        parts.append(("    waiting of the pipeline's stages", plan.bubble_seconds))
    hidden = sum(time.communication.values()) - time.exposed
    lines = ["time, ms", f"  {'step, the sum of':<36}{plan.step_seconds * 1e3:>11.1f}"]
    lines += [f"{name:<38}{seconds * 1e3:>11.1f}" for name, seconds in parts]
    if plan.slowest.microbatch:
        lines.append(f"  {'each further microbatch':<36}{plan.microbatch_seconds * 1e3:>11.1f}")
    if hidden > 0:
        lines.append(f"  {f'communication hidden, {_microbatches(run)}':<36}{hidden * 1e3:>11.1f}")
    lines.append(f"  {'tokens/s of a device':<36}{plan.tokens_per_second:>11.0f}")
    lines.append(f"  {'TFLOP/s of a device':<36}{plan.flops_per_second / 1e12:>11.1f}")
    return lines


def _microbatches(number: int) -> str:
    return f"{number} microbatch{'' if number == 1 else 'es'}"
