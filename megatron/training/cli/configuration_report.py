"""The report of the settings in effect, which rank 0 prints once."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron.core.module_names import named_parameters
from megatron.core.tokenizers.tokenizer_config import flag_of
from megatron.training.telemetry.flops import FLOP_CONVENTION

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.arguments import Settings

_STRATEGY_MEANING = {
    "no_shard": "plain data parallelism: every rank holds all weights, gradients and optimizer state",
    "optim": "optimizer state is sharded",
    "optim_grads": "optimizer state and gradients are sharded",
    "optim_grads_params": "optimizer state, gradients and weights are sharded",
}


def count_parameters(model: torch.nn.Module, groups: ProcessGroupCollection | None = None) -> tuple[int, int]:
    """Count the elements of all parameters of the whole model, and those that this rank holds.

    Ranks: all of the process groups; blocks.
    """
    numel_by_name: dict[str, int] = {}
    held = 0
    for name, parameter in named_parameters(model):
        own_name = name.removeprefix("module.")  # the wrapper's prefix, which canonical names do not have
        numel_by_name[getattr(parameter, "canonical_name", own_name)] = parameter.numel()
        held += getattr(parameter, "_local_tensor", parameter).numel()
    # Stages have other layers, expert-parallel ranks other experts; the tied weight of two stages has one name.
    for group in () if groups is None else (groups.pp, groups.ep):
        if group is not None:
            of_ranks: list[Any] = [None] * group.size()
            dist.all_gather_object(of_ranks, numel_by_name, group=group)
            numel_by_name = {name: numel for names in of_ranks for name, numel in names.items()}
    return sum(numel_by_name.values()), held


def report_configuration(
    settings: Settings,
    *,
    device: torch.device,
    model: torch.nn.Module,
    padded_vocab_size: int,
    vocab_size: int,
    flops_per_sample: int,
) -> str:
    """Format the report of the settings in effect.

    Ranks: all, since each rank's number of parameters is gathered; blocks.
    """
    total, held = count_parameters(model, getattr(model, "pg_collection", None))
    held_by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held_by_rank, held)
    ddp, batch, loop = settings.ddp, settings.batch, settings.loop
    strategy = ddp.data_parallel_sharding_strategy
    rows = {
        "device": f"{device.type}, {dist.get_backend()}, {dist.get_world_size()} ranks",
        "versions": f"python {platform.python_version()}, torch {torch.__version__}",
        "time-out of communication": f"{settings.distributed.timeout_minutes} minutes",
        "engine": "one, for --megatron-fsdp-version 1 and 2",
        "sharding strategy": f"{strategy} ({_STRATEGY_MEANING[strategy]})" + _hybrid(settings),
        "data-parallel group": f"{batch.data_parallel_size} ranks",
        "split of the model": _split(settings),
        "overlap": ddp.describe_overlap(flag_of),
        "transport": (
            f"{', '.join(getattr(model, 'transport_names', []))} (asked for: {ddp.transport_kind}); gathers and reductions "
            f"{'on two communicators' if settings.distributed.create_all_gather_group else 'take turns on one communicator'}"
        ),
        "compute dtype": _name(settings.model.transformer.params_dtype),
        "main weights": (
            "fp32, as the bf16 model weights and the optimizer's 16 bits more"
            if settings.optimizer.store_param_remainders and ddp.megatron_fsdp_main_params_dtype == torch.bfloat16
            else _name(ddp.megatron_fsdp_main_params_dtype)
        ),
        "main gradients": _name(ddp.megatron_fsdp_main_grads_dtype),
        "moments of Adam": f"{_name(settings.optimizer.exp_avg_dtype)}, of squares {_name(settings.optimizer.exp_avg_sq_dtype)}",
        "gradients on the wire": _name(ddp.megatron_fsdp_grad_comm_dtype),
        "parameters": f"{total:,} in all; {min(held_by_rank):,} to {max(held_by_rank):,} on a rank",
        "tokenizer": settings.tokenizer.kind + _not_read(settings),
        "vocabulary": f"padded to {padded_vocab_size:,} ids{_upstream_vocabulary(settings, vocab_size)}",
        "global batch": (
            f"{batch.global_batch_size} samples = {batch.num_microbatches} microbatches * "
            f"{batch.data_parallel_size} ranks * {batch.micro_batch_size}; "
            f"{batch.global_batch_size * settings.data.seq_length:,} tokens{_growth(settings)}"
        ),
        "length": (
            f"{loop.train_iters} iterations, {batch.consumed_after(loop.train_iters)} samples"
            if loop.train_samples is None
            else f"{loop.train_samples} samples over all runs, {loop.train_iters} iterations if all are of this batch size"
        ),
        "gradient": "mean over tokens"
        if settings.model.transformer.calculate_per_token_loss
        else "mean over microbatches",
        "CUDA graph": (
            f"each whole iteration, after {settings.cuda_graph.warmup_steps} eager ones"
            if settings.cuda_graph.enabled
            else "none"
        ),
        "checkpoint format": _CHECKPOINT_FORMATS[settings.checkpoint.ckpt_format],
        "model FLOPs": f"{flops_per_sample:.4e} of a sample. {FLOP_CONVENTION}",
    }
    width = max(map(len, rows))
    lines = [f"  {name} {'.' * (width + 3 - len(name))} {value}" for name, value in rows.items()]
    return "\n".join(("effective configuration:", *lines))


_CHECKPOINT_FORMATS = {
    None: "own (a PyTorch DCP directory, under the names of the unwrapped model)",
    "torch_dist": "torch_dist (a PyTorch DCP directory, under Megatron-LM's names)",
    "fsdp_dtensor": "fsdp_dtensor (a PyTorch DCP directory, under the names of Megatron-LM with Megatron-FSDP)",
}


def _upstream_vocabulary(settings: Settings, vocab_size: int) -> str:
    """Say where Megatron-LM pads to another number."""
    there = settings.model.upstream_vocab_size(vocab_size)
    if there == settings.model.padded_vocab_size(vocab_size):
        return ""
    return f" (in Megatron-LM, with these tensor-parallel ranks: {there:,}, as with --padded-vocab-size {there})"


def report_settings(settings: Settings) -> str:
    """Format what was asked for, before data are read or anything is allocated."""
    return "\n".join((*_all_settings(settings), *notices_of(settings)))


def report_sizes(sizes: Sequence[int | None]) -> str:
    """Format the numbers of samples [3] for which datasets are built."""
    rows = zip(("train", "validation", "test"), sizes, strict=True)
    named = [f"    {name + ':':<12}{'all, once' if size is None else f'{size:,}'}" for name, size in rows]
    return "\n".join((" > datasets target sizes (minimum size):", *named))


def notices_of(settings: Settings) -> list[str]:
    """Return the lines that name what is done instead of what some flags ask for."""
    said = [f"  {line}" for line in settings.said_once.lines]
    return ["flags whose place something else takes:", *said] if said else []


def _growth(settings: Settings) -> str:
    earlier = ", ".join(f"{size} from sample {start} on" for start, size in settings.batch.schedule[:-1])
    return f"; before sample {settings.batch.schedule[-1][0]} fewer: {earlier}" if earlier else ""


def _split(settings: Settings) -> str:
    """Describe the splits of the model that are in use."""
    grid, transformer = settings.grid, settings.model.transformer
    sequence = " with sequence parallelism" if transformer.sequence_parallel else ""
    comm_type = "layer by layer" if isinstance(transformer.cp_comm_type, list) else transformer.cp_comm_type or "p2p"
    parts = {
        f"tensor {grid.size('tp')}{sequence}": grid.size("tp"),
        f"context {grid.size('cp')} ({comm_type})": grid.size("cp"),
        f"pipeline {grid.size('pp')}": grid.size("pp"),
        f"experts {grid.size('ep')}": grid.size("ep"),
        f"tensor of experts {grid.size('expt_tp')}": 1 if grid.size("tp") == grid.size("expt_tp") else 2,
    }
    used = [text for text, size in parts.items() if size > 1]
    return f"{', '.join(used)}; ranks in the order {grid.order}" if used else "none"


def _hybrid(settings: Settings) -> str:
    instances = settings.ddp.num_distributed_optimizer_instances
    if instances == 1:
        return ""
    shares = settings.ddp.outer_dp_sharding_strategy == "optim"
    return f", in {instances} replicas of {'all but the optimizer state, which they share' if shares else 'the whole state'}"


def _all_settings(settings: Settings) -> list[str]:
    """Format one line for each part of the settings, with the values that differ from their defaults."""
    lines = ["settings that differ from their defaults:"]
    for part in dataclasses.fields(settings):
        if part.name in ("said_once", "megatron_lm", "launch_line"):  # said below, named by a checkpoint, typed
            continue
        value = getattr(settings, part.name)
        changed = ", ".join(f"{name}={_name(setting)}" for name, setting in _changed(value).items())
        lines.append(f"  {part.name}: {changed or 'none'}")
    return lines


def _changed(config: Any) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            changed |= _changed(value)
        elif not field.name.endswith("init_method") and (
            field.default is dataclasses.MISSING or value != field.default
        ):
            changed[field.name] = value
    return changed


def _name(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return getattr(value, "__name__", None) or str(value)


def _not_read(settings: Settings) -> str:
    """Name the settings of other tokenizers: they are accepted, since launch scripts are shared between tokenizers."""
    names = settings.tokenizer.not_read()
    return f" (which does not read {', '.join(map(flag_of, names))})" if names else ""
