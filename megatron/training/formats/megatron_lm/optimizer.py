"""The optimizer's state in Megatron-LM's distributed checkpoints, as state of ours.

[Note: Megatron-LM's optimizer state] ``torch_dist`` has a tensor ``optimizer.state.<key>.<name of the weight>`` for each kind of state,
stacked as the weights are, and the fp32 main weights under the key ``param`` or ``fp32_param``. In ``fully_sharded_model_space``, which
older versions wrote, the elements of each tensor-parallel part follow each other in one last dim. ``fsdp_dtensor`` has
``optimizer.state.<name of the weight>.<key>``, and its weights are the main weights. ``dp_reshardable`` has the buffers of
Megatron-LM's gradients, in which no name says where a weight lies.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from megatron.core.distributed.fsdp.checkpoint import Entries, Part, StoredTensor, View
from megatron.training.formats.architecture import Architecture
from megatron.training.formats.megatron_lm.names import EMBEDDING, OUTPUT, views_in
from megatron.training.formats.rules import check_stored

MAIN_WEIGHT = ("param", "fp32_param")
"""Keys of main weights, of the distributed optimizer and of the others."""

_OF_TORCH_DIST = re.compile(
    r"(?:chained_[0-9]+\.)?optimizer\.state\.(?P<key>[a-z0-9_]+)\.(?P<name>(?:embedding|decoder|mtp|output_layer)\..+)"
)
_OF_FSDP_DTENSOR = re.compile(r"optimizer\.state\.(?:module\.)+(?P<name>.+)\.(?P<key>[a-z0-9_]+)")

STATE_KEYS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""Keys of state that has a number for each element of a weight, the same in both programs."""

StateNames = Mapping[str, Mapping[str, str]]


def state_names(entries: Entries) -> dict[str, dict[str, str]]:
    """Return the optimizer's tensors by key and by their weight's name in Megatron-LM; {} if there are none."""
    found: dict[str, dict[str, str]] = {}
    for full, entry in entries.items():
        match = _OF_TORCH_DIST.fullmatch(full) or _OF_FSDP_DTENSOR.fullmatch(full)
        if match is not None and isinstance(entry, StoredTensor):
            found.setdefault(match["key"], {})[match["name"]] = full
    return found


def main_weight_views(
    names: StateNames, entries: Entries, sizes: Mapping[str, torch.Size], architecture: Architecture, where: Path
) -> dict[str, View]:
    """Return our weights as views of Megatron-LM's main weights, of those that have any there.

    Raises:
        ValueError: as ``state_views``.
    """
    stored = {name: full for key in MAIN_WEIGHT for name, full in names.get(key, {}).items()}
    if not stored:
        return {}
    kept = _whole(stored, entries, sizes)
    found = views_in(kept, sizes, architecture, "")
    some = {name: view for name, view in found.items() if all(part.source in kept for part in view.parts)}
    return _checked(some, stored, entries, f"{where} (main weights)")


def state_views(
    key: str,
    names: StateNames,
    entries: Entries,
    sizes: Mapping[str, torch.Size],
    architecture: Architecture,
    where: Path,
    *,
    of_all: bool = True,
) -> dict[str, View]:
    """Return the state ``key`` of all weights as views, by the weights' names.

    Args:
        of_all: all weights have it; else those that have it there, as with Muon, which leaves some to AdamW.

    Raises:
        ValueError: some weight has none there, or of another shape; names it.
    """
    stored = names.get(key, {})
    found = views_in(_whole(stored, entries, sizes), sizes, architecture, "")
    if not of_all:
        found = {name: view for name, view in found.items() if all(part.source in stored for part in view.parts)}
    return _checked(found, stored, entries, f"{where} (optimizer state {key})")


def _whole(stored: Mapping[str, str], entries: Entries, sizes: Mapping[str, torch.Size]) -> dict[str, StoredTensor]:
    """Return the stored tensors by the names of weights, the vocabulary's in its own shape where it is flattened."""
    found = {}
    for name, full in stored.items():
        tensor = entries[full]
        assert isinstance(tensor, StoredTensor)
        if name in (EMBEDDING, OUTPUT) and len(tensor.size) == 3:
            width = sizes[EMBEDDING][-1]
            tensor = replace(tensor, size=torch.Size((math.prod(tensor.size) // width, width)))
        found[name] = tensor
    return found


def _checked(views: Mapping[str, View], stored: Mapping[str, str], entries: Entries, where: str) -> dict[str, View]:
    own = {name: entries[full] for name, full in stored.items()}
    flat = {name for name, view in views.items() if any(_is_flattened(part, own) for part in view.parts)}
    check_stored(
        {name: view for name, view in views.items() if name not in flat},
        own,
        where,
        unused=lambda name: True,
        may_be_longer=lambda name: name in (EMBEDDING, OUTPUT),
    )
    found = {
        name: replace(view, parts=list(_rows_of_flattened(view.parts, own, where))) if name in flat else view
        for name, view in views.items()
    }
    return {
        name: replace(view, parts=[part._replace(source=stored[part.source]) for part in view.parts])
        for name, view in found.items()
    }


def _is_flattened(part: Part, entries: Entries) -> bool:
    stored = entries.get(part.source)
    return isinstance(stored, StoredTensor) and len(stored.size) == len(part.begin) + 1


def _rows_of_flattened(parts: Sequence[Part], entries: Entries, where: str) -> Iterator[Part]:
    """Yield parts of tensors whose grid of parts is kept, each flattened: [stacks, X // x, Y // y, x * y] of [stacks, X, Y]."""
    for part in parts:
        stored = entries[part.source]
        assert isinstance(stored, StoredTensor)
        num_dims = min(len(part.sizes), 2)
        stack, grid, numel = part.begin[:-num_dims], stored.size[-1 - num_dims : -1], stored.size[-1]
        first = part.begin[len(stack)]
        if num_dims == 1:
            width, columns = 1, 1
        else:
            columns = grid[1]
            width = part.sizes[-1] // columns
        height = numel // max(width, 1)
        rows = part.sizes[0] if num_dims == len(part.sizes) else 0
        if not rows or width * height != numel or first + rows > grid[0] * height:
            raise ValueError(
                f"{where}: {part.source} must have the elements of {list(part.sizes)} in parts, got {list(stored.size)}; load it with "
                "--no-load-optim"
            )
        if num_dims == 1:
            for cell in range(first // height, math.ceil((first + rows) / height)):
                begin, end = max(first, cell * height), min(first + rows, (cell + 1) * height)
                yield Part(
                    (part.offsets[0] + begin - first,),
                    (end - begin,),
                    part.source,
                    (*stack, cell, begin - cell * height),
                    is_copy=part.is_copy,
                )
            continue
        for row in range(rows):
            cell, inner = divmod(first + row, height)
            for column in range(columns):
                yield Part(
                    (part.offsets[0] + row, part.offsets[1] + column * width),
                    (1, width),
                    part.source,
                    (*stack, cell, column, inner * width),
                    is_copy=part.is_copy,
                )
