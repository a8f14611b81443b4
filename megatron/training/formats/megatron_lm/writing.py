"""How a run of ours is written so that Megatron-LM reads it."""

from __future__ import annotations

import json

import torch

from megatron.core.distributed.fsdp.checkpoint import OBJECT, ForeignLayout, Part, View
from megatron.training.formats.architecture import Architecture, layers_with_experts, tensor_sizes
from megatron.training.formats.megatron_lm.distributed import CONFIG
from megatron.training.formats.megatron_lm.names import EXPERT, FUSED_NORMS, LAYER, is_gated


def layout_of(ckpt_format: str, architecture: Architecture, *, iteration: int) -> ForeignLayout:
    """Return how weights are written so that Megatron-LM reads them.

    Args:
        ckpt_format: ``torch_dist`` or ``fsdp_dtensor``.
        iteration: that of the checkpoint.

    Ranks: pure.
    """
    counters = {"iteration": iteration, "checkpoint_version": 3.0}
    sizes = tensor_sizes(architecture)
    if ckpt_format == "fsdp_dtensor":
        views = {name: View(size, _parts_of_fsdp_dtensor(name, size, architecture)) for name, size in sizes.items()}
        return ForeignLayout(views, {**counters, "args": None})
    has_experts = layers_with_experts(architecture) if architecture.get("num_moe_experts") else [0]
    is_mixed = len(set(has_experts)) > 1
    views = {name: View(size, _parts_of_torch_dist(name, size, architecture, is_mixed)) for name, size in sizes.items()}
    content = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if is_mixed:
        content["non_homogeneous_layers"] = True
    values = {"common_state/shard_0_1": [{**counters, "content_metadata": content}]}
    backend = json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
    return ForeignLayout(views, values, {CONFIG: backend.encode()}, OBJECT)


def _parts_of_torch_dist(name: str, size: torch.Size, architecture: Architecture, is_mixed: bool) -> list[Part]:
    """Return where a tensor lies in ``torch_dist``: stacked, but by layer if some layers have experts and others not."""
    start, found = (0,) * len(size), LAYER.fullmatch(name)
    if found is None:
        return [Part(start, tuple(size), name, start)]
    layer, rest = int(found["layer"]), _norm_in_linear(name, found["rest"], architecture)
    index: tuple[int, ...] = ()
    expert = EXPERT.fullmatch(rest)
    if expert is not None:
        rest, index = f"mlp.experts.experts.{expert['linear']}.{expert['kind']}", (int(expert["expert"]),)
    if is_mixed:
        return [Part(start, tuple(size), f"decoder.layers.{layer}.{rest}", (*index, *start))]
    return [Part(start, tuple(size), f"decoder.layers.{rest}", (layer, *index, *start))]


def _parts_of_fsdp_dtensor(name: str, size: torch.Size, architecture: Architecture) -> list[Part]:
    start, found = (0,) * len(size), LAYER.fullmatch(name)
    rest = name if found is None else _norm_in_linear(name, found["rest"], architecture)
    expert = EXPERT.fullmatch(rest)
    if expert is not None:
        rest = f"mlp.experts.{expert['linear']}.{expert['kind']}{expert['expert']}"
    source = f"model.module.{rest}" if found is None else f"model.module.decoder.layers.{found['layer']}.{rest}"
    if not is_gated(name, architecture):
        return [Part(start, tuple(size), source, start)]
    half = (size[0] // 2, *size[1:])
    return [
        Part((number * half[0], *start[1:]), half, f"{source}{end}", start) for number, end in enumerate(("_w", "_v"))
    ]


def _norm_in_linear(name: str, rest: str, architecture: Architecture) -> str:
    """Return the name that a norm has with transformer-engine, where it is part of the linear layer behind it."""
    norm, _, kind = rest.partition(".")
    layer = int(name.split(".")[2])
    has_experts = bool(architecture.get("num_moe_experts")) and layers_with_experts(architecture)[layer]
    if norm not in FUSED_NORMS or (norm == "pre_mlp_layernorm" and has_experts):
        return rest
    return f"{FUSED_NORMS[norm]}.layer_norm_{kind}"
