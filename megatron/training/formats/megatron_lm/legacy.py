"""Megatron-LM's folders of ``--ckpt-format torch``: one archive of ``torch.save`` for each tensor- and pipeline-parallel rank.

Each archive has the rank's part of the model under ``model``, with layers counted within the stage; where a rank has several
stages, they are under ``model0``, ``model1`` and so on. Matrices are cut by rows or by
columns; the rows of a gated one are the gate and what it gates of this rank. For the optimizer's state see [Note: numbered weights] in
``legacy_optimizer.py``, and [Note: joined buckets] in ``legacy_buffers.py``.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence, Set
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.core.distributed.fsdp.checkpoint import (
    ArchivedTensor,
    CheckpointReader,
    Part,
    Place,
    StoredChunk,
    StoredTensor,
    View,
    ViewReader,
    read_archive,
)
from megatron.core.regular_file import is_regular
from megatron.training.formats.architecture import Architecture, sizes_of, tensor_sizes
from megatron.training.formats.foreign import ForeignCheckpoint
from megatron.training.formats.foreign_run import ForeignRun
from megatron.training.formats.megatron_lm.buffers import compare_main_weights
from megatron.training.formats.megatron_lm.distributed import steps_and_groups
from megatron.training.formats.megatron_lm.legacy_buffers import FILE as _DISTRIBUTED
from megatron.training.formats.megatron_lm.legacy_buffers import joined_state
from megatron.training.formats.megatron_lm.legacy_optimizer import (
    MAIN,
    STEP,
    WITHOUT,
    numbered_state,
    of_other_weights,
)
from megatron.training.formats.megatron_lm.names import EMBEDDING, OUTPUT, is_gated, places_of, refuse_hybrid
from megatron.training.formats.megatron_lm.run import run_of_archive
from megatron.training.formats.rules import check_stored

RANK_FOLDER = "mp_rank_[0-9]*"
_FILE = "model_optim_rng.pt"
_NAME = re.compile(r"mp_rank_(?P<tp>[0-9]{2})(_(?P<pp>[0-9]{3}))?(?P<ep>_[0-9]{3})?")
_LAYER = re.compile(r"decoder\.layers\.([0-9]+)\.")
_BY_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
_BY_ROWS = ("linear_qkv.weight", "linear_qkv.bias", "linear_fc1.weight", "linear_fc1.bias")

_Stages = list[list[dict[str, ArchivedTensor]]]  # by pipeline stage and tensor-parallel rank: tensors by name


def open_legacy(folder: Path, *, verify: bool = True) -> ForeignCheckpoint:
    """Open such a folder.

    Args:
        verify: compare what is read with the checksums of the archives.

    Raises:
        NotImplementedError: it is split in a way that is not served.
        ValueError, FileNotFoundError: a file is damaged or missing.
    """
    stages, optimizers = _read(folder)
    file = next(iter(sorted(folder.glob(RANK_FOLDER)))) / _FILE
    run = run_of_archive(folder, read_archive(file, file=_FILE), file)
    entries = {
        _source(stage, rank, name): _stored(tensor)
        for stage, ranks in enumerate(stages)
        for rank, tensors in enumerate(ranks)
        for name, tensor in tensors.items()
    }
    records = {tensor.record for ranks in stages for tensors in ranks for tensor in tensors.values()}
    stored = CheckpointReader(folder, entries=entries, verify=verify, records=records)

    def views(architecture: Architecture, state_keys: Sequence[str] | None) -> ViewReader:
        refuse_hybrid(architecture)
        if architecture.get("experimental_attention_variant") is not None:
            raise NotImplementedError(
                f"{folder} must be of a model without linear attention, got {architecture['experimental_attention_variant']}: the"
                " archives of --ckpt-format torch have its rows in another order; save it with --ckpt-format torch_dist"
            )
        found = {
            name: View(size, _parts(stages, name, size, is_gated(name, architecture)))
            for name, size in tensor_sizes(architecture).items()
        }
        ties = architecture["share_embeddings_and_output_weights"]
        read = {part.source for view in found.values() for part in view.parts}
        # The stage of multi-token prediction has a copy of the embedding.
        shared = (
            {name for name in found if name.startswith("embedding.")} if architecture.get("mtp_num_layers") else set()
        )

        def is_copy(name: str) -> bool:
            """Return whether another rank's copy is read, or a copy of the embedding."""
            own = name.partition(": ")[2]
            return (
                any(source.endswith(f": {own}") for source in read if source.split(",")[0] == name.split(",")[0])
                or (bool(ties) and own in (EMBEDDING, OUTPUT))
                or own in shared
            )

        check_stored(
            found, entries, folder, unused=is_copy, may_be_longer=lambda name: name.endswith((EMBEDDING, OUTPUT))
        )
        if state_keys is None:
            return ViewReader(stored, found)
        state = _State(stages, optimizers)
        return _with_state(stored, records, run, found, architecture, state_keys, state, verify=verify)

    num_ids = sum(rank[EMBEDDING].size[0] for rank in stages[0] if EMBEDDING in rank and rank[EMBEDDING].size)
    return ForeignCheckpoint(
        path=folder, kind="Megatron-LM, torch", architecture={}, views=views, num_ids=num_ids, run=run
    )


def _source(stage: int, rank: int, name: str) -> str:
    return f"stage {stage}, rank {rank}: {name}"


def _stored(tensor: ArchivedTensor) -> StoredTensor:
    chunk = StoredChunk((0,) * len(tensor.size), tuple(tensor.size), tensor.place)
    return StoredTensor(tensor.dtype, tensor.size, [chunk])


class _Saved(NamedTuple):
    """Name of a rank's folder, and what the archive of its model has of an optimizer."""

    rank: str
    optimizer: Any


class _State(NamedTuple):
    """The weights by stage, and what is saved of the optimizer of each pipeline and tensor-parallel rank."""

    stages: _Stages
    optimizers: list[list[_Saved]]

    def by_key(
        self, folder: Path, args: Mapping[str, Any], no_parameters: Container[str]
    ) -> dict[str, dict[str, ArchivedTensor]]:
        """Return the optimizer's tensors by key and by the source of the weight."""
        found: dict[str, dict[str, ArchivedTensor]] = {}
        for stage, rank in product(range(len(self.optimizers)), range(len(self.optimizers[0]))):
            chunks = [
                [
                    (source, tensor)
                    for name, tensor in self.stages[number][rank].items()
                    if (source := _source(number, rank, name)) not in no_parameters
                ]
                for number in range(stage, len(self.stages), len(self.optimizers))
            ]
            saved = self.optimizers[stage][rank]
            if is_regular(folder / saved.rank / _DISTRIBUTED):
                state = joined_state(chunks, folder, saved.rank, args, is_first_stage=stage == 0)
            else:
                state = numbered_state([one for chunk in chunks for one in chunk], saved.optimizer, folder)
            for key, source, tensor in state:
                found.setdefault(key, {})[source] = tensor
        return found


def _with_state(
    of_weights: CheckpointReader,
    records: Set[Place],
    run: ForeignRun,
    weights: Mapping[str, View],
    architecture: Architecture,
    keys: Sequence[str],
    state: _State,
    *,
    verify: bool,
) -> ViewReader:
    """Return a reader of the weights, in whose place are main weights where there are any, and of the optimizer's state."""
    folder = of_weights.folder
    parameters, buffers = sizes_of(architecture)
    by_key = state.by_key(folder, run.args, {part.source for name in buffers for part in weights[name].parts})
    if others := sorted(by_key.keys() ^ {*keys, MAIN, STEP} - ({MAIN, STEP} - by_key.keys())):
        raise ValueError(
            f"{folder} must hold optimizer state {', '.join(keys)}, got other: {', '.join(others)}; {WITHOUT}"
        )
    tensors = {
        f"{key} of {source}": _stored(tensor) for key, found in by_key.items() for source, tensor in found.items()
    }
    records = records | {tensor.record for found in by_key.values() for tensor in found.values()}
    entries = {**of_weights.entries, **tensors}
    stored = CheckpointReader(folder, entries=entries, verify=verify, records=records)

    def moved(key: str, name: str) -> View:
        parts = [part._replace(source=f"{key} of {part.source}") for part in weights[name].parts]
        if lacking := [part.source for part in parts if part.source not in tensors]:
            raise ValueError(f"{folder} must hold the optimizer's state of all weights, got no {lacking[0]}; {WITHOUT}")
        return View(weights[name].size, parts)

    halves = by_key.get(MAIN, {})
    main = {n: moved(MAIN, n) for n in parameters if all(part.source in halves for part in weights[n].parts)}
    if main:
        compare_main_weights(stored, main, weights, lambda got: of_other_weights(folder, got))
    if not run.steps:
        steps = {int(stored.tensor(f"{STEP} of {source}").item()) for source in by_key.get(STEP, {})}
        run = replace(run, steps=tuple(sorted(steps)))
    more, plain = steps_and_groups(run, parameters, keys)
    by_name = {f"optimizer.state.{name}.{key}": moved(key, name) for key in keys for name in parameters}
    return ViewReader(stored, {**weights, **main, **by_name, **more}, plain)


def _read(folder: Path) -> tuple[_Stages, list[list[_Saved]]]:
    found: dict[tuple[int, int], list[dict[str, ArchivedTensor]]] = {}
    optimizers: dict[tuple[int, int], _Saved] = {}
    for path in sorted(folder.glob(RANK_FOLDER)):
        match = _NAME.fullmatch(path.name)
        if match is None or match["ep"] is not None:
            raise NotImplementedError(
                f"{path} must be of a model without expert parallelism (mp_rank_XX or mp_rank_XX_YYY), got another name: save it "
                "with --ckpt-format torch_dist, which any split loads"
            )
        key = int(match["pp"] or 0), int(match["tp"])
        found[key], optimizer = _tensors(path / _FILE, f"{path.name}/{_FILE}")
        optimizers[key] = _Saved(path.name, optimizer)
    num_stages, num_ranks = (max(key[axis] for key in found) + 1 for axis in (0, 1))
    missing = [
        f"stage {stage}, tensor rank {rank}"
        for stage in range(num_stages)
        for rank in range(num_ranks)
        if (stage, rank) not in found
    ]
    if missing:
        raise FileNotFoundError(f"{folder} must have a folder for each rank, got none of {', '.join(missing[:8])}")
    if len(numbers := {len(chunks) for chunks in found.values()}) > 1:
        raise ValueError(
            f"{folder} must have as many stages on each rank, got {' and '.join(map(str, sorted(numbers)))}"
        )
    stages, first_layer = [], 0
    # Ranks with several stages take turns: all their first ones come before all their second ones.
    for chunk, stage in product(range(numbers.pop()), range(num_stages)):
        ranks = [
            {_with_layer(name, first_layer): tensor for name, tensor in found[stage, rank][chunk].items()}
            for rank in range(num_ranks)
        ]
        stages.append(ranks)
        first_layer = max((int(layer) + 1 for name in ranks[0] for layer in _LAYER.findall(name)), default=first_layer)
    return stages, [[optimizers[stage, rank] for rank in range(num_ranks)] for stage in range(num_stages)]


def _with_layer(name: str, first: int) -> str:
    return _LAYER.sub(lambda match: f"decoder.layers.{int(match[1]) + first}.", name)


def _tensors(path: Path, file: str) -> tuple[list[dict[str, ArchivedTensor]], Any]:
    """Return the tensors of each stage of a rank, of one or of several that take turns (virtual stages), and its optimizer's state."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} must be there, got no such file; restore it")
    content = read_archive(path, file=file)
    held = content if isinstance(content, Mapping) else {}
    models = (
        [held["model"]]
        if "model" in held
        else [held[key] for key in map("model{}".format, range(len(held))) if key in held]
    )
    if not models or not all(isinstance(model, Mapping) for model in models):
        raise NotImplementedError(
            f"{path} must hold a model under the key model, or its stages under model0, model1, ..., got none"
        )
    stages = []
    for model in models:
        tensors = {name: value for name, value in _flat(model).items() if isinstance(value, ArchivedTensor)}
        for name, tensor in tensors.items():
            if not tensor.is_contiguous:
                raise NotImplementedError(
                    f"{path}: {name} must be stored in the order of its elements, got a view of others"
                )
        stages.append(tensors)
    return stages, held.get("optimizer")


def _flat(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors by name, without a prefix of wrappers and without states of transformer-engine."""
    return {
        re.sub(r"^(module\.)+", "", name): value
        for name, value in model.items()
        if isinstance(name, str) and not name.endswith("_extra_state")
    }


def _parts(stages: _Stages, name: str, size: torch.Size, gated: bool) -> list[Part]:
    """Return the parts of a tensor of ours, of all tensor-parallel ranks of the stage that has it."""
    spellings = [place.source for place in places_of(name) if not place.index]
    for number, ranks in enumerate(stages):
        spelling = next((own for own in spellings if own in ranks[0]), None)
        if spelling is not None:
            tensors = [rank.get(spelling, ranks[0][spelling]) for rank in ranks]
            sources = [_source(number, rank, spelling) for rank in range(len(ranks))]
            return _joined(name, size, sources, [tensor.size for tensor in tensors], gated)
    start = (0,) * len(size)
    return [Part(start, tuple(size), _source(0, 0, name), start)]


def _joined(name: str, size: torch.Size, sources: list[str], sizes: list[torch.Size], gated: bool) -> list[Part]:
    start = (0,) * len(size)
    if name in (EMBEDDING, OUTPUT):
        return _vocabulary(size, sources, sizes)
    if name.endswith(_BY_COLUMNS) and len(size) == 2:
        width = size[1] // len(sources)
        return [Part((0, rank * width), (size[0], width), source, (0, 0)) for rank, source in enumerate(sources)]
    if not name.endswith(_BY_ROWS):
        return [Part(start, tuple(size), sources[0], start)]
    blocks = 2 if gated else 1
    rows, rest = size[0] // blocks // len(sources), tuple(size[1:])
    return [
        Part(
            (block * (size[0] // blocks) + rank * rows, *start[1:]),
            (rows, *rest),
            source,
            (block * rows, *start[1:]),
        )
        for rank, source in enumerate(sources)
        for block in range(blocks)
    ]


def _vocabulary(size: torch.Size, sources: list[str], sizes: list[torch.Size]) -> list[Part]:
    """Join the ranks' rows. Those beyond ours pad the vocabulary there; where ours has more, the last one is repeated."""
    parts, row, rest = [], 0, tuple(size[1:])
    zeros = (0,) * len(rest)
    for source, own in zip(sources, sizes, strict=True):
        rows = min(own[0] if own else 0, size[0] - row)
        if rows > 0:
            parts.append(Part((row, *zeros), (rows, *rest), source, (0, *zeros)))
            row += rows
            last = (source, rows - 1)
    return parts + [
        Part((extra, *zeros), (1, *rest), last[0], (last[1], *zeros), is_copy=True) for extra in range(row, size[0])
    ]
