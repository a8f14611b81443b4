"""How a run of ours is written so that Megatron-LM reads it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.distributed.fsdp.checkpoint import OBJECT, ForeignLayout, Part, View
from megatron.training.formats.architecture import (
    Architecture,
    layers_with_experts,
    layers_with_linear_attention,
    sizes_of,
)
from megatron.training.formats.linear_attention import has_sections, parts_of_sections, without_section
from megatron.training.formats.megatron_lm.distributed import CONFIG
from megatron.training.formats.megatron_lm.names import EXPERT, FUSED_NORMS, LAYER, MTP_LAYER, is_gated, refuse_hybrid
from megatron.training.formats.megatron_lm.optimizer import MAIN_WEIGHT, STATE_KEYS
from megatron.training.formats.megatron_lm.run import COMMON

_NO_STATE = "no_extra_state/shard_0_1"
_SCHEDULE = (
    "max_lr",
    "lr_warmup_steps",
    "num_steps",
    "lr_decay_style",
    "lr_decay_steps",
    "min_lr",
    "start_wd",
    "end_wd",
    "wd_incr_style",
    "wd_incr_steps",
)
# Keys of param groups without which torch.optim.AdamW would not go on.
_OF_TORCH = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """What a run says of itself in a checkpoint for Megatron-LM, beside its tensors.

    Args:
        args: its arguments by Megatron-LM's names, plain values.
        schedule: its schedule of rates, and the position in it.
        steps: numbers of updates that parts of the optimizer have made; [] without an optimizer.
    """

    args: Mapping[str, Any]
    schedule: Mapping[str, Any]
    steps: Sequence[int] = ()


def layout_of(
    ckpt_format: str, architecture: Architecture, *, iteration: int, run: SavedRun | None = None
) -> ForeignLayout:
    """Return how a checkpoint is written so that Megatron-LM reads it: with a run's state, or weights alone.

    Args:
        ckpt_format: ``torch_dist`` or ``fsdp_dtensor``.
        iteration: that of the checkpoint.
        run: None: weights alone.

    Ranks: pure.
    """
    refuse_hybrid(architecture)
    parameters, buffers = sizes_of(architecture)
    counters: dict[str, Any] = {"iteration": iteration, "checkpoint_version": 3.0, "args": None}
    if run is not None:
        counters["args"] = argparse.Namespace(**run.args)
        counters["opt_param_scheduler"] = {name: run.schedule[name] for name in _SCHEDULE if name in run.schedule}
    if ckpt_format == "fsdp_dtensor":
        return _fsdp_dtensor(parameters, buffers, architecture, counters, run)
    return _torch_dist(parameters, buffers, architecture, counters, run)


def args_to_save(
    args: Mapping[str, Any], architecture: Architecture, counters: Mapping[str, int], *, save_optim: bool
) -> dict[str, Any]:
    """Return a run's arguments as Megatron-LM has them in a checkpoint: with its counters, and sizes that it computes.

    They say that no state of random generators was saved: Megatron-LM then goes on with its own.
    """
    computed = {name: architecture[name] for name in ("ffn_hidden_size", "kv_channels") if name in architecture}
    return {
        **args,
        **computed,
        **counters,
        "no_save_rng": True,
        "no_save_optim": not save_optim or None,
        "async_save": False,
        "use_dist_ckpt": True,
        "data_parallel_random_init": False,
    }


def optimizer_steps(optimizer: torch.optim.Optimizer) -> tuple[int, ...]:
    """Return the numbers of updates that parameters of this rank have had, each once. Waits for the device."""
    return tuple(sorted({int(state["step"]) for state in optimizer.state.values() if "step" in state}))


def _torch_dist(
    parameters: Mapping[str, torch.Size],
    buffers: Mapping[str, torch.Size],
    architecture: Architecture,
    counters: Mapping[str, Any],
    run: SavedRun | None,
) -> ForeignLayout:
    has_experts = layers_with_experts(architecture) if architecture.get("num_moe_experts") else [0]
    is_mixed = len(set(has_experts)) > 1 or any(layers_with_linear_attention(architecture))
    weights = {
        name: _parts_of_torch_dist(name, size, architecture, is_mixed)
        for name, size in {**parameters, **buffers}.items()
    }
    views = {name: View((parameters.get(name) or buffers[name]), parts) for name, parts in weights.items()}
    aliases: dict[str, str] = {}
    for name in parameters if run is not None else ():
        for key in STATE_KEYS:
            moved = [part._replace(source=f"optimizer.state.{key}.{part.source}") for part in weights[name]]
            views[f"optimizer.state.{name}.{key}"] = View(parameters[name], moved)
        for key in MAIN_WEIGHT:
            aliases |= {f"optimizer.state.{key}.{part.source}": part.source for part in weights[name]}
    aliases |= dict.fromkeys(_extra_states(weights, architecture, is_mixed), _NO_STATE)
    content: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if is_mixed:
        content["non_homogeneous_layers"] = True

    def values(optimizer: Mapping[str, Any]) -> dict[str, Any]:
        common = {**counters, "content_metadata": content}
        if optimizer and run is not None:
            common["content_metadata"] = {**content, "distrib_optim_sharding_type": "fully_reshardable"}
            common["optimizer"] = _common_optimizer(optimizer, run)
        return {COMMON: [common], _NO_STATE: [None]}

    backend = json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
    return ForeignLayout(views, values, aliases, {CONFIG: backend.encode()}, OBJECT)


def _extra_states(weights: Mapping[str, list[Part]], architecture: Architecture, is_mixed: bool) -> Iterator[str]:
    """Yield the names of the objects that modules of Megatron-LM look for; without FP8 there is nothing in them."""
    layers, experts = architecture["num_layers"], architecture.get("num_moe_experts")
    for name, parts in weights.items():
        module = without_section(parts[0].source).rpartition(".")[0]
        if module.endswith((".self_attention", ".conv1d")):
            continue  # what linear attention has itself, and torch's layer
        found, of_mtp = LAYER.fullmatch(name), MTP_LAYER.fullmatch(name)
        match = found or of_mtp
        expert = EXPERT.fullmatch(match["rest"]) if match is not None else None
        grid = [] if found is None or is_mixed else [(found["layer"], layers)]
        grid += [] if expert is None else [(expert["expert"], experts)]
        where, size = (".".join(str(pair[number]) for pair in grid or [(0, 1)]) for number in (0, 1))
        yield f"{module}._extra_state/shard_{where}_{size}"
        if match is not None and name.endswith("linear_proj.weight"):
            yield f"{module.removesuffix('linear_proj')}core_attention._extra_state/shard_{where}_{size}"


def _fsdp_dtensor(
    parameters: Mapping[str, torch.Size],
    buffers: Mapping[str, torch.Size],
    architecture: Architecture,
    counters: Mapping[str, Any],
    run: SavedRun | None,
) -> ForeignLayout:
    weights = {
        name: _parts_of_fsdp_dtensor(name, size, architecture) for name, size in {**parameters, **buffers}.items()
    }
    views = {name: View((parameters.get(name) or buffers[name]), parts) for name, parts in weights.items()}
    aliases: dict[str, str] = {}
    # Parameters have the names that they have in the wrappers, one more with bf16; the model's own state dict leaves it out.
    wrappers = "module." * (3 if run is not None and run.args.get("bf16") else 2)
    of_optimizer = {
        name: [f"{wrappers}{part.source.removeprefix('model.module.')}" for part in weights[name]]
        for name in parameters
    }
    for name in parameters if run is not None else ():
        for key in STATE_KEYS:
            moved = [
                part._replace(source=f"optimizer.state.{theirs}.{key}")
                for part, theirs in zip(weights[name], of_optimizer[name], strict=True)
            ]
            views[f"optimizer.state.{name}.{key}"] = View(parameters[name], moved)
        aliases |= {f"optimizer.state.{theirs}.step": f"optimizer.state.{name}.step" for theirs in of_optimizer[name]}

    def values(optimizer: Mapping[str, Any]) -> dict[str, Any]:
        found = {name: value for name, value in counters.items() if name != "opt_param_scheduler"}
        found |= {f"opt_param_scheduler.{name}": v for name, v in counters.get("opt_param_scheduler", {}).items()}
        if optimizer and run is not None:
            for group in optimizer["optimizer.param_groups"]:
                meta = _group_of_megatron_lm(group, run, is_expert_parallel=False)
                for name in group["params"]:
                    is_expert = _is_expert_parallel(name, run)
                    theirs = (
                        without_section(of_optimizer[name][0].removesuffix("_w"))
                        if len(of_optimizer[name]) > 1
                        else of_optimizer[name][0]
                    )
                    for key, value in {**meta, "is_expert_parallel": is_expert}.items():
                        found[f"optimizer.param_to_group_meta.{theirs}.{key}"] = value
        return found

    return ForeignLayout(views, values, aliases)


def _common_optimizer(optimizer: Mapping[str, Any], run: SavedRun) -> dict[str | int, Any]:
    """Return the plain part of an optimizer's state dict, for each kind of optimizer that Megatron-LM may make of the flags.

    With expert parallelism it has one for what all ranks share and one for the experts.
    """
    groups = optimizer["optimizer.param_groups"]
    kinds = sorted({_is_expert_parallel(name, run) for group in groups for name in group["params"]})
    parts: dict[str | int, Any] = {}
    for number, is_expert in enumerate(kinds):
        own = [
            _group_of_megatron_lm(group, run, is_expert_parallel=is_expert)
            for group in groups
            if any(_is_expert_parallel(name, run) == is_expert for name in group["params"])
        ]
        inner = {"param_groups": own, "state": {"common_step": max(run.steps, default=0)}}
        parts[number] = {**inner, "optimizer": inner, "param_state_sharding_type": "fully_reshardable"}
    return parts if len(parts) > 1 else parts[0]


def _is_expert_parallel(name: str, run: SavedRun) -> bool:
    return ".local_experts." in name and int(run.args.get("expert_model_parallel_size") or 1) > 1


def _group_of_megatron_lm(group: Mapping[str, Any], run: SavedRun, *, is_expert_parallel: bool) -> dict[str, Any]:
    """Return a param group with all that its optimizers read of theirs, without the parameters."""
    own = {name: value for name, value in group.items() if name not in ("params", "lr_mult")}
    rates = {name: own.get(name) for name in ("max_lr", "min_lr")}
    return {
        **_OF_TORCH,
        "bias_correction": True,
        **own,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "is_expert_parallel": is_expert_parallel,
        "default_config": rates == {"max_lr": run.args.get("lr"), "min_lr": run.args.get("min_lr")},
        "step": max(run.steps, default=0),
    }


def _parts_of_torch_dist(name: str, size: torch.Size, architecture: Architecture, is_mixed: bool) -> list[Part]:
    """Return where a tensor lies in ``torch_dist``: stacked, but by layer if some layers have experts and others not."""
    start, found, of_mtp = (0,) * len(size), LAYER.fullmatch(name), MTP_LAYER.fullmatch(name)
    match = found or of_mtp
    if match is None:
        return [Part(start, tuple(size), name, start)]
    layer, rest = int(match["layer"]), _norm_in_linear(name, match["rest"], architecture)
    index: tuple[int, ...] = ()
    expert = EXPERT.fullmatch(rest)
    if expert is not None:
        rest, index = f"mlp.experts.experts.{expert['linear']}.{expert['kind']}", (int(expert["expert"]),)
    if has_sections(name, architecture):
        where = f"mtp.layers.{layer}.transformer_layer" if of_mtp is not None else f"decoder.layers.{layer}"
        return parts_of_sections(name, f"{where}.{rest}", size, architecture)
    if of_mtp is not None:
        return [Part(start, tuple(size), f"mtp.layers.{layer}.transformer_layer.{rest}", (*index, *start))]
    if is_mixed:
        return [Part(start, tuple(size), f"decoder.layers.{layer}.{rest}", (*index, *start))]
    return [Part(start, tuple(size), f"decoder.layers.{rest}", (layer, *index, *start))]


def _parts_of_fsdp_dtensor(name: str, size: torch.Size, architecture: Architecture) -> list[Part]:
    start, found = (0,) * len(size), LAYER.fullmatch(name) or MTP_LAYER.fullmatch(name)
    rest = name if found is None else _norm_in_linear(name, found["rest"], architecture)
    expert = EXPERT.fullmatch(rest)
    if expert is not None:
        rest = f"mlp.experts.{expert['linear']}.{expert['kind']}{expert['expert']}"
    before = "" if found is None else name.removesuffix(found["rest"])
    source = f"model.module.{before}{rest}"
    if has_sections(name, architecture):
        return parts_of_sections(name, source, size, architecture)
    if not is_gated(name, architecture):
        return [Part(start, tuple(size), source, start)]
    half = (size[0] // 2, *size[1:])
    return [
        Part((number * half[0], *start[1:]), half, f"{source}{end}", start) for number, end in enumerate(("_w", "_v"))
    ]


def _norm_in_linear(name: str, rest: str, architecture: Architecture) -> str:
    """Return the name that a norm has with transformer-engine, where it is part of the linear layer behind it."""
    norm, _, kind = rest.rpartition(".")
    layer = int(name.split(".")[2]) if name.startswith("decoder.") else -1  # others are as the last one
    has_experts = bool(architecture.get("num_moe_experts")) and layers_with_experts(architecture)[layer]
    is_linear = bool(layers_with_linear_attention(architecture)[layer])
    # Behind it lie several linear layers: a router, or projections to latent vectors.
    stands_alone = {
        "pre_mlp_layernorm": has_experts,
        "input_layernorm": bool(architecture.get("multi_latent_attention")) and not is_linear,
    }
    if norm not in FUSED_NORMS or stands_alone.get(norm):
        return rest
    return f"{FUSED_NORMS[norm][is_linear and norm == 'input_layernorm']}.layer_norm_{kind}"
