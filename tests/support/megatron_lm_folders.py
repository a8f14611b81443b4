"""Checkpoints in Megatron-LM's formats, made from its own tiny models (fixtures/models) by the formats' description."""

from __future__ import annotations

import argparse
import enum
import json
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed.checkpoint as dcp

from megatron.core.distributed.fsdp.checkpoint import CheckpointReader, TensorReader
from megatron.training.formats.architecture import build_model
from megatron.training.launch.gpt_config import GPTConfig
from tests.support.tiny_gpt import load_fixture

Tensors = Mapping[str, torch.Tensor]


class Backend(enum.Enum):
    """A class that only the program that saved knows."""

    auto = 1


def save_alone(state: dict[str, Any], folder: Path, *, flattens: bool = True) -> None:
    """Save with PyTorch's DCP from one process; nests become entries of their own if it ``flattens``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is one process
        planner = dcp.DefaultSavePlanner(flatten_state_dict=flattens)
        dcp.save(state, checkpoint_id=folder, planner=planner, no_dist=True)


def load_alone(state: dict[str, Any], folder: Path) -> None:
    """Load with PyTorch's DCP, as Megatron-LM does, in place and in one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=folder, no_dist=True)


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
    state: dict[str, Any] = {"common_state/shard_0_1": [{"iteration": 7, "args": argparse.Namespace(a=Backend.auto)}]}
    for name, stacked in stacked_tensors(weights, norms_in_linears=norms_in_linears).items():
        state[name] = stacked
        if name.startswith("decoder.layers."):
            for layer in range(len(stacked)):
                state[f"{name.rpartition('.')[0]}._extra_state/shard_{layer}_2"] = [b"fp8"]
            state[f"optimizer.state.exp_avg.{name}"] = torch.zeros_like(stacked)
    _save_iteration(state, folder)
    return folder


def _save_iteration(state: dict[str, Any], folder: Path, *, iteration: int = 7, backend: str = "torch_dist") -> None:
    path = folder / f"iter_{iteration:07d}"
    save_alone(state, path, flattens=not backend)
    if backend:
        (path / "metadata.json").write_text(json.dumps({"sharded_backend": backend, "sharded_backend_version": 1}))
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))


def stacked_tensors(weights: Tensors, *, norms_in_linears: bool = True) -> dict[str, torch.Tensor]:
    """The tensors of all layers and experts stacked, under their names in ``torch_dist``."""
    by_layer: dict[str, dict[tuple[int, ...], torch.Tensor]] = {}
    found: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        words = name.split(".")
        if words[0] != "decoder" or words[1] != "layers":
            found[name] = tensor
            continue
        index: tuple[int, ...] = (int(words[2]),)
        rest = ".".join(words[3:])
        if "local_experts" in rest:
            before, after = rest.split("local_experts.")
            number, _, after = after.partition(".")
            index, rest = (*index, int(number)), f"{before}experts.{after}"
        if norms_in_linears:
            rest = rest.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
            if "mlp.experts." not in "".join(weights):
                rest = rest.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        by_layer.setdefault(f"decoder.layers.{rest}", {})[index] = tensor
    for name, parts in by_layer.items():
        shape = [max(index[axis] for index in parts) + 1 for axis in range(len(next(iter(parts))))]
        whole = next(iter(parts.values()))
        found[name] = torch.empty(*shape, *whole.shape, dtype=whole.dtype)
        for index, tensor in parts.items():
            found[name][index] = tensor
    return found


def write_run(
    folder: Path, native: Path, kind: str, args: argparse.Namespace, *, gated: bool, dtype: torch.dtype
) -> Path:
    """Write a checkpoint of ours as a run of Megatron-LM saves it, with the optimizer's state.

    Args:
        kind: ``fully_reshardable``, ``fully_sharded_model_space`` (of an older version, by two tensor-parallel ranks),
            ``dp_reshardable`` (by two times two tensor- and pipeline-parallel ranks), ``fsdp_dtensor``, ``torch`` (by as many) or
            ``distrib_optim`` (the same with a distributed optimizer).
        dtype: of the model weights; the main weights are fp32.
    """
    reader = CheckpointReader(native)
    extra = reader.values(["extra_state.scheduler", "extra_state.state"])
    schedule = dict(extra["extra_state.scheduler"])
    for name in ("init_lr", "wsd_decay_steps", "lr_wsd_decay_style"):
        del schedule[name]
    iteration = extra["extra_state.state"]["iteration"]
    weights = [
        name for name in reader.entries if not name.startswith(("optimizer.", "extra_state.", "optional_state."))
    ]
    main = {name: reader.tensor(name) for name in weights}
    moments = {
        key: {name: reader.tensor(f"optimizer.state.{name}.{key}") for name in weights}
        for key in ("exp_avg", "exp_avg_sq")
    }
    groups = [{"lr": 0.5, "betas": (0.9, 0.999), "eps": 1e-8, "wd_mult": 1.0, "step": iteration}]
    common = {"iteration": iteration, "args": args, "checkpoint_version": 3.0, "opt_param_scheduler": schedule}
    if kind in ("torch", "distrib_optim"):
        write_legacy(folder, main, gated=gated, num_ranks=2, num_stages=2)
        own = folder / f"iter_{iteration:07d}"
        (folder / "iter_0000007").rename(own)
        for key, tensors in moments.items():
            write_legacy(folder / key, tensors, gated=gated, num_ranks=2, num_stages=2)
        for path in own.iterdir():
            add_numbered_state(path / "model_optim_rng.pt", folder, common, list(moments), groups[0], dtype)
            if kind == "distrib_optim":
                move_to_buffers(path, 3000 if path.name.endswith("_000") else 1 << 60)
        (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))
        return folder
    if kind == "fsdp_dtensor":
        model = {f"module.{name}": tensor for name, tensor in _split_by_name(main, gated).items()}
        of_optimizer: dict[str, Any] = {"state": {}, "param_to_group_meta": {}}
        for name in main:
            whole = "module.module.module." + next(iter(_split_by_name({name: main[name]}, gated))).removesuffix("_w")
            of_optimizer["param_to_group_meta"][whole] = groups[0]
        for key, tensors in moments.items():
            for name, tensor in _split_by_name(tensors, gated).items():
                of_optimizer["state"].setdefault(f"module.module.module.{name}", {})[key] = tensor
        rng = {
            "(0, 0)": [{"random_rng_state": (3, (1, 2), None), "torch_rng_state": torch.zeros(8, dtype=torch.uint8)}]
        }
        state = {**common, "model": model, "optimizer": of_optimizer, "rng_state": rng}
        _save_iteration(state, folder, iteration=iteration, backend="")
        return folder
    state = {name: tensor.to(dtype) for name, tensor in stacked_tensors(main).items()}
    common["optimizer"] = {"optimizer": {"param_groups": groups}, "param_state_sharding_type": kind}
    state["rng_state/shard_0.0_1.1"] = [[{"np_rng_state": numpy.random.get_state()}]]
    if kind == "dp_reshardable":
        buckets = _buckets({**moments, "param": main}, gated=gated, num_ranks=2, num_stages=2, bucket_numel=3000)
        objects = {
            f"optimizer.distributed.dp_group_idx_{i}.optimizer/shard_0_1": [{"param_groups": groups}] for i in range(4)
        }
        del common["optimizer"]
        split = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "moe_grouped_gemm": True}
        common["args"] = argparse.Namespace(**vars(args), **split)
        state |= {**buckets, **objects, "common_state/shard_0_1": [common]}
        _save_iteration(state, folder, iteration=iteration)
        return folder
    is_flat = kind == "fully_sharded_model_space"
    for key, tensors in {**moments, "fp32_param" if is_flat else "param": main}.items():
        for name, tensor in stacked_tensors(tensors).items():
            prefix = "chained_0." if is_flat and "experts" in name else ""
            state[f"{prefix}optimizer.state.{key}.{name}"] = _flattened(name, tensor, gated) if is_flat else tensor
    if is_flat:
        path = folder / f"iter_{iteration:07d}"
        path.mkdir(parents=True)
        torch.save(common, path / "common.pt")
    else:
        state["common_state/shard_0_1"] = [common]
    _save_iteration(state, folder, iteration=iteration)
    return folder


def add_numbered_state(
    file: Path, folder: Path, common: dict[str, Any], keys: list[str], group: dict[str, Any], dtype: torch.dtype
) -> None:
    """Put the optimizer's state into a rank's archive, numbered group by group: weights that decay, and the others."""
    content = torch.load(file, weights_only=False)
    weights = {name: tensor for name, tensor in content["model"].items() if tensor is not None}
    moments = {
        key: torch.load(folder / key / "iter_0000007" / file.parent.name / file.name, weights_only=False)["model"]
        for key in keys
    }
    by_group = [[name for name in weights if (weights[name].dim() > 1) is decays] for decays in (True, False)]
    numbers = {name: number for number, name in enumerate([*by_group[0], *by_group[1]])}
    step = torch.tensor(float(common["iteration"]))  # as torch's optimizers have it, not in the groups
    own = {key: value for key, value in group.items() if key != "step"}
    saved: dict[str, Any] = {
        "state": {
            number: {"step": step, **{key: moments[key][name] for key in keys}} for name, number in numbers.items()
        },
        "param_groups": [
            {**own, "wd_mult": wd_mult, "params": [numbers[name] for name in names]}
            for wd_mult, names in zip((1.0, 0.0), by_group, strict=True)
        ],
    }
    main = [[weights[name] for name in names] for names in by_group]
    model = {name: tensor if tensor is None else tensor.to(dtype) for name, tensor in content["model"].items()}
    optimizer = {"optimizer": saved, "fp32_from_fp16_params": main}
    torch.save({**content, **common, "model": model, "optimizer": optimizer}, file)


def move_to_buffers(folder: Path, bucket_numel: int) -> None:
    """Move the state of a rank's optimizer into ``distrib_optim.pt``, as a distributed optimizer has it."""
    content = torch.load(folder / "model_optim_rng.pt", weights_only=False)
    saved, mains = content["optimizer"]["optimizer"], content["optimizer"]["fp32_from_fp16_params"]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    main = dict(zip(numbers, [tensor for group in mains for tensor in group], strict=True))
    weights = {name: tensor for name, tensor in content["model"].items() if tensor is not None}
    by_group = [name for decays in (True, False) for name in weights if (weights[name].dim() > 1) is decays]
    number_of = {name: number for number, name in enumerate(by_group)}
    buffer: dict[str, Any] = {}
    for key in ("param", *(key for key in saved["state"][0] if key != "step")):
        own = [main[n] if key == "param" else saved["state"][n][key] for n in map(number_of.__getitem__, weights)]
        buffer[key] = torch.cat(_cut_buckets(own, bucket_numel))
    buffer["numel_unpadded"] = len(buffer["param"])
    dtypes = (next(iter(weights.values())).dtype, torch.float32)
    torch.save({"buckets_coalesced": True, 0: {dtypes: buffer}}, folder / "distrib_optim.pt")
    step = int(saved["state"][0]["step"])
    groups = [
        {**{k: v for k, v in group.items() if k != "params"}, "step": float(step)} for group in saved["param_groups"]
    ]
    content["optimizer"] = {"optimizer": {"param_groups": groups}}
    split = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "ddp_bucket_size": bucket_numel}
    split |= {"overlap_grad_reduce": True, "untie_embeddings_and_output_weights": True}
    content["args"] = argparse.Namespace(**{**vars(content["args"]), **split})
    torch.save(content, folder / "model_optim_rng.pt")


_IN_LAYERS_OF_TRANSFORMER_ENGINE = (
    r"self_attention\.linear_proj\.weight",
    r"input_layernorm\.weight",
    r"self_attention\.linear_qkv\.weight",
    r"pre_mlp_layernorm\.weight",
    r"mlp\.linear_fc[12]\.weight",
    r"mlp\.router\.weight",
    r"mlp\.experts\..*linear_fc1\.weight",
    r"mlp\.experts\..*linear_fc2\.weight",
)


def _buckets(
    tensors: Mapping[str, Tensors], *, gated: bool, num_ranks: int, num_stages: int, bucket_numel: int
) -> dict[str, Any]:
    """The tensors of each key in the buckets of each model-parallel rank, with NaN where no weight lies."""
    names = list(next(iter(tensors.values())))
    layers = sorted({int(name.split(".")[2]) for name in names if name.startswith("decoder.layers.")})
    per_stage = len(layers) // num_stages
    state: dict[str, Any] = {}
    for stage in range(num_stages):
        own = [name for name in names if name.startswith("embedding.")] if stage == 0 else []
        for layer in layers[stage * per_stage : (stage + 1) * per_stage]:
            prefix = f"decoder.layers.{layer}."
            for pattern in _IN_LAYERS_OF_TRANSFORMER_ENGINE:
                own += [name for name in names if re.fullmatch(re.escape(prefix) + pattern, name)]
        if stage == num_stages - 1:
            own += ["decoder.final_layernorm.weight", "output_layer.weight"]
        for rank in range(num_ranks):
            group = f"optimizer.distributed.dp_group_idx_{rank + num_ranks * stage}"
            for key, values in tensors.items():
                for index, bucket in enumerate(
                    _cut_buckets([_cut(name, values[name], rank, num_ranks, gated) for name in own], bucket_numel)
                ):
                    name = f"{group}.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_{index}.{key}"
                    state[name] = bucket
    return state


def _cut_buckets(tensors: list[torch.Tensor], bucket_numel: int) -> list[torch.Tensor]:
    """Lay tensors out from the last to the first, each at a multiple of 64, and cut after those that fill a bucket."""
    buckets, current = [], torch.empty(0)
    for tensor in reversed(tensors):
        padding = torch.full((-current.numel() % 64,), float("nan"))
        current = torch.cat([current, padding, tensor.flatten()])
        if current.numel() >= bucket_numel:
            buckets.append(current)
            current = torch.empty(0)
    return [*buckets, current] if current.numel() else buckets


def _flattened(name: str, tensor: torch.Tensor, gated: bool) -> torch.Tensor:
    """The parts of two tensor-parallel ranks, each with its elements in one dim."""
    num_dims = 1 if name.endswith(("bias", "norm_weight", "layernorm.weight")) else 2
    stack = tensor.shape[:-num_dims]
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        rows, width = tensor.shape[-2:]
        return tensor.reshape(*stack, rows, 2, width // 2).transpose(-3, -2).reshape(*stack, 1, 2, rows * width // 2)
    splits = 1
    if name.endswith(("linear_qkv.weight", "linear_fc1.weight", "word_embeddings.weight", "output_layer.weight")):
        splits = 4 if gated and "linear_fc1" in name else 2
    grid = (splits, 1) if num_dims == 2 else (splits,)
    return tensor.reshape(*stack, *grid, tensor[(0,) * len(stack)].numel() // splits)


def _split_by_name(tensors: Tensors, gated: bool) -> dict[str, torch.Tensor]:
    """The tensors under their names in ``fsdp_dtensor``, with the halves of gated matrices."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        own = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        if ".local_experts." in own:
            before, after = own.split("local_experts.")
            number, _, after = after.partition(".")
            own = f"{before}{after}{number}"
        if gated and ".linear_fc1.weight" in own:
            found[f"{own}_w"], found[f"{own}_v"] = (half.clone() for half in tensor.chunk(2))
        else:
            found[own] = tensor
    return found


def write_fsdp_dtensor(folder: Path, weights: Tensors, *, gated: bool, tied: bool) -> Path:
    """A name for each layer and expert under ``module``, and the halves of gated matrices."""
    model: dict[str, Any] = {f"module.{name}": tensor for name, tensor in _split_by_name(weights, gated).items()}
    model["module.decoder.layers.0.mlp.linear_fc1._extra_state"] = None
    if tied:
        model["module.output_layer.weight"] = weights["embedding.word_embeddings.weight"]
    state = {"model": model, "iteration": 7, "args": argparse.Namespace(a=Backend.auto), "checkpoint_version": 3.0}
    save_alone(state, folder / "iter_0000007")
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return folder


def write_legacy_chunks(folder: Path, weights: Tensors, *, gated: bool, num_ranks: int) -> Path:
    """Archives of a model of two layers on two pipeline ranks with two stages each: embedding, a layer, a layer, output."""
    whole = write_legacy(folder / "whole", weights, gated=gated, num_ranks=num_ranks, num_stages=1)
    for rank in range(num_ranks):
        content = torch.load(whole / "iter_0000007" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt", weights_only=False)
        model = content.pop("model")
        parts: list[dict[str, Any]] = [{}, {}, {}, {}]
        for name, tensor in model.items():
            layer = name.startswith("decoder.layers.")
            stage = 1 + int(name.split(".")[2]) if layer else 0 if name.startswith("embedding.") else 3
            parts[stage][name.replace("layers.1.", "layers.0.") if layer else name] = tensor
        for stage in range(2):
            path = folder / "iter_0000007" / f"mp_rank_{rank:02d}_{stage:03d}"
            path.mkdir(parents=True)
            torch.save({**content, "model0": parts[stage], "model1": parts[2 + stage]}, path / "model_optim_rng.pt")
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
