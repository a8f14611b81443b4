"""Checkpoints in Megatron-LM's formats, made from its own tiny models (fixtures/models) by the formats' description."""

from __future__ import annotations

import argparse
import enum
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from megatron.core.distributed.fsdp.checkpoint import TensorReader
from megatron.training.formats.architecture import build_model
from megatron.training.launch.gpt_config import GPTConfig
from tests.support.tiny_gpt import load_fixture

Tensors = Mapping[str, torch.Tensor]


class Backend(enum.Enum):
    """A class that only the program that saved knows."""

    auto = 1


def save_alone(state: dict[str, Any], folder: Path) -> None:
    """Save with PyTorch's DCP from one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is one process
        dcp.save(state, checkpoint_id=folder, no_dist=True)


def weights_and_architecture(name: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The weights of a fixture under Megatron-Core's names, and our settings of its model."""
    model, tensors, settings = load_fixture(name)
    own = dict(settings["gpt_model"])
    config = GPTConfig(
        transformer=model.config,
        max_position_embeddings=own.pop("max_sequence_length"),
        model_vocab_size=own.pop("vocab_size"),
        **own,
    )
    weights = {key[len("weight.") :]: value for key, value in tensors.items() if key.startswith("weight.")}
    return weights, config.architecture(1)


def losses_of(name: str, reader: TensorReader, architecture: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Our model's losses of the fixture's tokens with the weights that a reader has, and Megatron-LM's."""
    model = build_model(architecture).eval()
    model.load_state_dict({key: reader.tensor(key) for key, _ in model.named_parameters()}, strict=True)
    _, tensors, _ = load_fixture(name)
    tokens = tensors["tokens"]
    positions = torch.arange(tokens.shape[1] - 1).expand(tokens.shape[0], -1)
    with torch.no_grad():
        return model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]), tensors["loss"]


def write_torch_dist(folder: Path, weights: Tensors, *, norms_in_linears: bool = True) -> Path:
    """Layers and experts stacked, states of transformer-engine and the common state as objects."""
    by_layer: dict[str, dict[tuple[int, ...], torch.Tensor]] = {}
    state: dict[str, Any] = {"common_state/shard_0_1": [{"iteration": 7, "args": argparse.Namespace(a=Backend.auto)}]}
    for name, tensor in weights.items():
        words = name.split(".")
        if words[0] != "decoder" or words[1] != "layers":
            state[name] = tensor
            continue
        index: tuple[int, ...] = (int(words[2]),)
        rest = ".".join(words[3:])
        if "local_experts" in rest:
            before, after = rest.split("local_experts.")
            number, _, after = after.partition(".")
            index, rest = (*index, int(number)), f"{before}experts.{after}"
        if norms_in_linears:
            rest = rest.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
            rest = rest.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        by_layer.setdefault(f"decoder.layers.{rest}", {})[index] = tensor
        state[f"decoder.layers.{rest}._extra_state/shard_{index[0]}_2"] = [b"fp8"]
    for name, parts in by_layer.items():
        shape = [max(index[axis] for index in parts) + 1 for axis in range(len(next(iter(parts))))]
        stacked = torch.empty(*shape, *next(iter(parts.values())).shape)
        for index, tensor in parts.items():
            stacked[index] = tensor
        state[name] = stacked
        state[f"optimizer.state.exp_avg.{name}"] = torch.zeros_like(stacked)
    save_alone(state, folder / "iter_0000007")
    (folder / "iter_0000007" / "metadata.json").write_text(
        json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
    )
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return folder


def write_fsdp_dtensor(folder: Path, weights: Tensors, *, gated: bool, tied: bool) -> Path:
    """A name for each layer and expert under ``module``, and the halves of gated matrices."""
    model: dict[str, Any] = {}
    for name, tensor in weights.items():
        own = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        if ".local_experts." in own:
            before, after = own.split("local_experts.")
            number, _, after = after.partition(".")
            own = f"{before}{after}{number}"
        if gated and ".linear_fc1.weight" in own:
            model[f"module.{own}_w"], model[f"module.{own}_v"] = (half.clone() for half in tensor.chunk(2))
        else:
            model[f"module.{own}"] = tensor
        model["module.decoder.layers.0.mlp.linear_fc1._extra_state"] = None
    if tied:
        model["module.output_layer.weight"] = weights["embedding.word_embeddings.weight"]
    state = {"model": model, "iteration": 7, "args": argparse.Namespace(a=Backend.auto), "checkpoint_version": 3.0}
    save_alone(state, folder / "iter_0000007")
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return folder


def write_legacy(folder: Path, weights: Tensors, *, gated: bool, num_ranks: int, num_stages: int) -> Path:
    """One archive for each tensor- and pipeline-parallel rank."""
    num_layers = 1 + max(int(name.split(".")[2]) for name in weights if name.startswith("decoder.layers."))
    per_stage = num_layers // num_stages
    for stage in range(num_stages):
        for rank in range(num_ranks):
            model: dict[str, Any] = {}
            for name, tensor in weights.items():
                words = name.split(".")
                own = name
                if name.startswith("decoder.layers."):
                    if int(words[2]) // per_stage != stage:
                        continue
                    own = ".".join([*words[:2], str(int(words[2]) % per_stage), *words[3:]])
                elif (name.startswith("embedding.")) != (stage == 0) and num_stages > 1:
                    continue
                model[own] = _cut(name, tensor, rank, num_ranks, gated)
            suffix = f"_{stage:03d}" if num_stages > 1 else ""
            path = folder / "iter_0000007" / f"mp_rank_{rank:02d}{suffix}"
            path.mkdir(parents=True)
            model["decoder.layers.0.mlp.linear_fc1._extra_state"] = None
            content = {
                "args": argparse.Namespace(a=Backend.auto),
                "checkpoint_version": 3.0,
                "iteration": 7,
                "model": model,
            }
            torch.save(content, path / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return folder


def _cut(name: str, tensor: torch.Tensor, rank: int, num_ranks: int, gated: bool) -> torch.Tensor:
    if name.endswith(("word_embeddings.weight", "output_layer.weight", "linear_qkv.weight", "linear_qkv.bias")):
        return tensor.chunk(num_ranks)[rank].clone()
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return tensor.chunk(num_ranks, dim=1)[rank].contiguous()
    if ".linear_fc1." in name:
        halves = tensor.chunk(2) if gated else (tensor,)
        return torch.cat([half.chunk(num_ranks)[rank] for half in halves])
    return tensor.clone()
