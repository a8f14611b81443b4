"""Optimizer state in the buffers of Megatron-LM's gradients: ``dp_reshardable``, which its distributed optimizer writes by default.

[Note: buckets] Each model-parallel rank has a buffer of its weights, in the reverse order in which its modules have them. A weight begins
at a multiple of 64 elements. A buffer is cut into buckets after whole weights; a bucket's tensors, one for each key, are stored without the
padding at its end. So the sizes of the buckets and the order of the weights say where each lies; no name does. Where the order is not
the one here, main weights are not the weights, so some are compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.core.distributed.fsdp.checkpoint import (
    CheckpointReader,
    Chunk,
    Entries,
    Part,
    StoredTensor,
    View,
    ViewReader,
)
from megatron.training.formats.architecture import Architecture
from megatron.training.formats.megatron_lm.names import EMBEDDING, EXPERT, LAYER, OUTPUT, is_gated

MAIN = "param"
_BUCKET = re.compile(
    r"(?:chained_0\.)?optimizer\.distributed\.dp_group_idx_(?P<group>[0-9]+)\.gbuf_idx_(?P<buffer>[0-9]+)\.dtype_.+"
    r"\.bucket_idx_(?P<bucket>[0-9]+)\.(?P<key>[a-z_]+)"
)
_ALIGNMENT = 64
_BY_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
_BY_ROWS = ("linear_qkv.weight", "linear_qkv.bias", "linear_fc1.weight", "linear_fc1.bias")
# Of modules within a layer, as Megatron-LM builds them; norms of transformer-engine's linears are in these.
_ORDER = (
    "input_layernorm.",
    "self_attention.linear_proj.",
    "self_attention.linear_qkv.",
    "self_attention.q_layernorm.",
    "self_attention.k_layernorm.",
    "pre_mlp_layernorm.",
    "mlp.linear_fc1.",
    "mlp.linear_fc2.",
    "mlp.router.",
    "mlp.experts.",
    "mlp.shared_experts.gate_weight",
    "mlp.shared_experts.linear_fc1.",
    "mlp.shared_experts.linear_fc2.",
)
# Arguments that divide the model in a way that is not computed here.
_OTHER_SPLITS = (
    "virtual_pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "multi_latent_attention",
    "experimental_attention_variant",
    "mtp_num_layers",
)


def has_buckets(entries: Entries) -> bool:
    """Return whether optimizer state lies in buckets."""
    return any(_BUCKET.fullmatch(name) for name in entries)


@dataclass(frozen=True)
class _Rows(Sequence[Part]):
    """The rows [rows, width] of a box of a view, one part each, which follow each other in a bucket; made when asked for."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    source: str
    begin: int
    is_matrix: bool

    def __len__(self) -> int:
        return self.rows[1] - self.rows[0] if self.is_matrix else 1

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index] if isinstance(index, slice) else self._part(range(len(self))[index])

    def __iter__(self) -> Iterator[Part]:
        return map(self._part, range(len(self)))

    def _part(self, index: int) -> Part:
        if not self.is_matrix:
            return Part((self.rows[0],), (self.rows[1] - self.rows[0],), self.source, (self.begin,))
        width = self.columns[1] - self.columns[0]
        return Part((self.rows[0] + index, self.columns[0]), (1, width), self.source, (self.begin + index * width,))


class _Chain(Sequence[Part]):
    """Parts of several boxes, one after the other."""

    def __init__(self, boxes: Sequence[Sequence[Part]]) -> None:
        self.boxes = boxes

    def __len__(self) -> int:
        return sum(map(len, self.boxes))

    def __iter__(self) -> Iterator[Part]:
        return (part for box in self.boxes for part in box)

    def __getitem__(self, index: Any) -> Any:
        return (
            list(self)[index]
            if isinstance(index, slice) or index < 0
            else next(p for i, p in enumerate(self) if i == index)
        )


def bucket_views(
    stored: CheckpointReader,
    weights: Mapping[str, View],
    parameters: Mapping[str, torch.Size],
    architecture: Architecture,
    args: Mapping[str, Any],
    keys: Sequence[str],
) -> tuple[dict[str, View], dict[str, dict[str, View]]]:
    """Return the main weights as views of what the buckets have, and the state by key and weight.

    Args:
        weights: the weights as views of what the checkpoint has.
        args: Megatron-LM's.

    Raises:
        ValueError: the buckets are not those of this model, or of a split that is not served; says what.
    """
    where = stored.folder
    buckets = _buckets(stored.entries, where)
    vocabulary = stored.entries[next(iter(weights[EMBEDDING].parts)).source].size[0]  # type: ignore[union-attr]
    boxes = _boxes(buckets, parameters, architecture, args, vocabulary, where)
    wanted = {MAIN, *keys}
    lacking = wanted - {key for by_key in buckets.values() for bucket in by_key for key in bucket}
    if lacking:
        raise ValueError(f"{where} must hold optimizer state {', '.join(sorted(lacking))}, got none; {_WITHOUT}")
    found = {key: _views(boxes, key, parameters) for key in wanted}
    compare_main_weights(stored, found[MAIN], weights, lambda got: _not_of_this_model(where, got))
    return found[MAIN], {key: found[key] for key in keys}


_WITHOUT = "load it with --no-load-optim, or --finetune to begin at iteration 0"
_Bucket = dict[str, tuple[str, int]]  # name and number of elements by key


def _buckets(entries: Entries, where: Path) -> dict[int, list[_Bucket]]:
    """Return the buckets of each model-parallel rank, in order."""
    found: dict[int, dict[int, _Bucket]] = {}
    for name, entry in entries.items():
        match = _BUCKET.fullmatch(name)
        if match is None or not isinstance(entry, StoredTensor):
            continue
        if int(match["buffer"]):
            raise ValueError(
                f"{where} must have one buffer of gradients for each model-parallel rank, got several (weights of several dtypes, or "
                f"experts of their own ranks); {_WITHOUT}"
            )
        bucket = found.setdefault(int(match["group"]), {}).setdefault(int(match["bucket"]), {})
        bucket[match["key"]] = (name, entry.numel)
    return {group: [buckets[index] for index in sorted(buckets)] for group, buckets in found.items()}


@dataclass(frozen=True)
class _Box:
    """A box of a weight, and where its elements begin in a bucket."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    bucket: _Bucket
    begin: int
    copies_from: int | None = None


def _boxes(
    buckets: Mapping[int, Sequence[_Bucket]],
    parameters: Mapping[str, torch.Size],
    architecture: Architecture,
    args: Mapping[str, Any],
    vocabulary: int,
    where: Path,
) -> dict[str, list[_Box]]:
    tensor, pipeline = (int(args.get(f"{kind}_model_parallel_size") or 1) for kind in ("tensor", "pipeline"))
    others = [f"{name} {args[name]}" for name in _OTHER_SPLITS if args.get(name)]
    experts = int(args.get("expert_model_parallel_size") or 1)
    others += [f"expert_model_parallel_size {experts}"] if experts > 1 else []
    if others or len(buckets) != tensor * pipeline:
        got = ", ".join(others) or f"buffers of {len(buckets)} ranks for {tensor} * {pipeline}"
        raise ValueError(
            f"{where} must be of a model that tensor- and pipeline-parallel ranks alone divide evenly, got {got}: save its optimizer "
            f"with --dist-ckpt-optim-fully-reshardable, or {_WITHOUT}"
        )
    sizes = dict(parameters)
    for name in (EMBEDDING, OUTPUT):
        if name in sizes:
            sizes[name] = torch.Size((vocabulary, sizes[name][1]))
    found: dict[str, list[_Box]] = {}
    for stage in range(pipeline):
        names = _names_of_stage(sizes, architecture, args, stage, pipeline)
        for rank in range(tensor):
            _lay_out(found, buckets[rank + tensor * stage], names, sizes, architecture, rank, tensor, where)
    return found


def _names_of_stage(
    sizes: Mapping[str, torch.Size], architecture: Architecture, args: Mapping[str, Any], stage: int, stages: int
) -> list[str]:
    """Return the weights of a pipeline stage in the order of its modules; "" stands for a copy of the embedding."""
    per_stage = architecture["num_layers"] // stages
    layers: dict[int, list[str]] = {}
    for name in sizes:
        match = LAYER.fullmatch(name)
        if match is not None and int(match["layer"]) // per_stage == stage:
            layers.setdefault(int(match["layer"]), []).append(match["rest"])
    names = [name for name in sizes if name.startswith("embedding.")] if stage == 0 else []
    for layer in sorted(layers):
        ordered = sorted(layers[layer], key=lambda rest: _place_in_layer(rest, args, layers[layer]))
        names += [f"decoder.layers.{layer}.{rest}" for rest in ordered]
    if stage == stages - 1:
        names += [name for name in sizes if name.startswith("decoder.final_layernorm.")]
        names += [OUTPUT] if OUTPUT in sizes else [""] * (stages > 1)
    return names


def _place_in_layer(rest: str, args: Mapping[str, Any], others: Sequence[str]) -> tuple[int, ...]:
    """Return the place of a weight among those of its layer: of its module, expert, linear, and in this."""
    module = rest
    if args.get("transformer_impl", "transformer_engine") != "local":
        module = rest.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        if not any("mlp.router." in other for other in others):
            module = module.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
    kind = module.rpartition(".")[2]
    within = ("layer_norm_weight", "layer_norm_bias", "weight", "bias", "gate_weight").index(kind)
    place = next(index for index, start in enumerate(_ORDER) if module.startswith(start))
    expert = EXPERT.fullmatch(module)
    if expert is None:
        return (place, 0, 0, within)
    linear, number = int(expert["linear"][-1]), int(expert["expert"])
    return (place, linear, within, number) if args.get("moe_grouped_gemm") else (place, number, linear, within)


def _lay_out(
    found: dict[str, list[_Box]],
    buckets: Sequence[_Bucket],
    names: Sequence[str],
    sizes: Mapping[str, torch.Size],
    architecture: Architecture,
    rank: int,
    ranks: int,
    where: Path,
) -> None:
    """Add where the weights of a rank lie: see [Note: buckets]."""
    index, begin = 0, 0
    numels = [next(iter(bucket.values()))[1] for bucket in buckets]
    for name in reversed(names):
        begin = -(-begin // _ALIGNMENT) * _ALIGNMENT
        size = sizes[name or EMBEDDING]
        local = list(_local_boxes(name or EMBEDDING, size, architecture, rank, ranks))
        if index == len(buckets):
            raise _not_of_this_model(where, "more weights than buckets")
        for rows, columns in local:
            if name and (rank == 0 or _is_split(name)):
                found.setdefault(name, []).append(_Box(rows, columns, buckets[index], begin))
            begin += (rows[1] - rows[0]) * (columns[1] - columns[0])
        if begin > numels[index]:
            raise _not_of_this_model(
                where, f"{numels[index]} elements in bucket {index}, in which {name} ends at {begin}"
            )
        if numels[index] in (begin, -(-begin // _ALIGNMENT) * _ALIGNMENT):
            index, begin = index + 1, 0
    if index != len(buckets) or begin:
        raise _not_of_this_model(where, f"{len(buckets)} buckets of {numels} elements")


def _not_of_this_model(where: Path, got: str) -> ValueError:
    return ValueError(
        f"{where} must hold the optimizer's buffers of this model, in the order in which Megatron-LM's layers have their weights, got "
        f"{got}: save its optimizer with --dist-ckpt-optim-fully-reshardable, or {_WITHOUT}"
    )


def _is_split(name: str) -> bool:
    return name in (EMBEDDING, OUTPUT) or name.endswith((*_BY_COLUMNS, *_BY_ROWS))


def _local_boxes(
    name: str, size: torch.Size, architecture: Architecture, rank: int, ranks: int
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield the boxes (rows, columns) of a weight that a tensor-parallel rank has, in the order of its elements."""
    rows, width = size[0], size[1] if len(size) > 1 else 1
    if name.endswith(_BY_COLUMNS) and len(size) == 2:
        yield (0, rows), (rank * (width // ranks), (rank + 1) * (width // ranks))
    elif name in (EMBEDDING, OUTPUT) or name.endswith(_BY_ROWS):
        blocks = 2 if is_gated(name, architecture) else 1
        block, own = rows // blocks, rows // blocks // ranks
        for number in range(blocks):
            yield (number * block + rank * own, number * block + (rank + 1) * own), (0, width)
    else:
        yield (0, rows), (0, width)


def _views(boxes: Mapping[str, Sequence[_Box]], key: str, parameters: Mapping[str, torch.Size]) -> dict[str, View]:
    found = {}
    for name, size in parameters.items():
        parts: list[Sequence[Part]] = []
        last: tuple[int, Part] | None = None
        for box in boxes[name]:
            rows = (box.rows[0], min(box.rows[1], size[0]))
            if rows[0] < rows[1]:
                own = _Rows(rows, box.columns, box.bucket[key][0], box.begin, len(size) > 1)
                parts.append(own)
                last = max(last or (0, own[-1]), (rows[1], own[-1]), key=lambda pair: pair[0])
        # Rows that pad our vocabulary and are not there are copies of the last one.
        if last is not None and last[0] < size[0]:
            parts.append([last[1]._replace(offsets=(row, 0), is_copy=True) for row in range(last[0], size[0])])
        found[name] = View(size, _Chain(parts))
    return found


def compare_main_weights(
    stored: CheckpointReader,
    main: Mapping[str, View],
    weights: Mapping[str, View],
    refusal: Callable[[str], Exception],
) -> None:
    """Check that the main weights of the first and the last layer round to the weights, and raise the ``refusal`` if not."""
    layers = sorted({int(match["layer"]) for name in main if (match := LAYER.fullmatch(name))})
    names = [
        name for name in main if name.startswith(tuple(f"decoder.layers.{layer}." for layer in {layers[0], layers[-1]}))
    ]
    mains, models = ViewReader(stored, main), ViewReader(stored, weights)
    for name in names:
        size = torch.Size((min(2, main[name].size[0]), *main[name].size[1:]))
        dtype = models.entries[name].dtype  # type: ignore[union-attr]
        first, second = (torch.empty(size, dtype=kind) for kind in (torch.float32, dtype))
        for reader, rows in ((mains, first), (models, second)):
            plan = reader.plan_parts([Chunk(name, main[name].size, torch.Size([0] * len(size)), rows)])
            plan.verify()
            plan.read()
        if not torch.equal(first.to(dtype), second):
            raise refusal(f"other main weights where those of {name} should be")
