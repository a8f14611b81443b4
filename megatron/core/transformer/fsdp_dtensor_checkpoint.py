"""State dicts of DTensors for DCP, with the names in Megatron-LM's ``fsdp_dtensor`` checkpoints.

A fused down-projection of multi-latent attention is stored as two separate projections, so that models with and without the fusion
can read each other's checkpoints. The parts are views, so DCP reads directly into the model's weights.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import split_dtensor
from megatron.core.model_wrappers import unwrap_model
from megatron.core.module_names import whole_names

logger = logging.getLogger(__name__)

StateDict = dict[str, Any]

_FUSED = re.compile(r"(?P<attention>.+\.)linear_qkv_down_proj\.(?P<leaf>weight|layer_norm_weight|layer_norm_bias)")
_MOST_NAMED = 20


def handle_parts_in_state_dict(
    model: nn.Module, model_state_dict: StateDict, optimizer_state_dict: StateDict | None
) -> tuple[StateDict, StateDict | None]:
    """Rename what this pipeline stage numbers from 0 to its name in the whole model."""
    whole = whole_names(unwrap_model(model))
    return _each(
        lambda name, value: {name.removesuffix(_core(name)) + whole(_core(name)): value},
        model_state_dict,
        optimizer_state_dict,
    )


def handle_mla_down_proj_in_state_dict(
    model: nn.Module, model_state_dict: StateDict, optimizer_state_dict: StateDict | None
) -> tuple[StateDict, StateDict | None]:
    """Split each fused down-projection into those of queries and of keys and values, and rename its norm to the layer's.

    Args:
        optimizer_state_dict: state by parameter name; None if there is none.

    Ranks: all of the parameters' meshes.
    """
    sections = {
        _core(f"{name}."): [config.q_lora_rank, config.kv_lora_rank + config.qk_pos_emb_head_dim]
        for name, module in model.named_modules()
        if hasattr(module, "linear_qkv_down_proj") and (config := getattr(module, "config", None)) is not None
    }
    return _each(lambda name, value: _apart(name, value, sections), model_state_dict, optimizer_state_dict)


def handle_mtp_in_state_dict(
    model: nn.Module, model_state_dict: StateDict, optimizer_state_dict: StateDict | None
) -> tuple[StateDict, StateDict | None]:
    """Rename the layer of a multi-token prediction module to its name on disk, ``transformer_layer``."""
    return _each(
        lambda name, value: {name.replace(".mtp_model_layer.", ".transformer_layer."): value},
        model_state_dict,
        optimizer_state_dict,
    )


def _each(
    change: Callable[[str, Any], StateDict], model_state_dict: StateDict, optimizer_state_dict: StateDict | None
) -> tuple[StateDict, StateDict | None]:
    """Apply ``change`` to each entry of the model's state dict, and to the state of each parameter."""
    changed = {key: value for name, given in model_state_dict.items() for key, value in change(name, given).items()}
    if optimizer_state_dict is None or "state" not in optimizer_state_dict:
        return changed, optimizer_state_dict
    state: StateDict = {}
    for name, own in optimizer_state_dict["state"].items():
        for kind, value in own.items():
            # Both parts get a copy of numbers such as the step.
            parts = change(name, value) if isinstance(value, DTensor) else dict.fromkeys(change(name, None), value)
            for key, part in parts.items():
                state.setdefault(key, {})[kind] = part
    return changed, {**optimizer_state_dict, "state": state}


def _apart(name: str, value: Any, sections: Mapping[str, list[int]]) -> StateDict:
    """Return the entries on disk for an entry of a fused down-projection; return others unchanged."""
    found = _FUSED.fullmatch(name)
    if found is None or _core(found["attention"]) not in sections:
        return {name: value}
    if found["leaf"] == "weight":
        names = [f"{found['attention']}linear_{kind}_down_proj.weight" for kind in ("q", "kv")]
        if value is None:
            return dict.fromkeys(names)
        return dict(zip(names, split_dtensor(value, sections[_core(found["attention"])], dim=0), strict=True))
    layer = found["attention"].removesuffix(".").rpartition(".")[0]
    return {f"{layer}.input_layernorm.{found['leaf'].removeprefix('layer_norm_')}": value}


def _core(name: str) -> str:
    """Return a name without the prefixes of wrappers."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def validate_fsdp_dtensor_model_load(
    state_dict_metadata: Iterable[str],
    load_state_dict: Mapping[str, Any],
    checkpoint_path: object,
    strict: str | StrictHandling = StrictHandling.RAISE_UNEXPECTED,
    max_reported: int = _MOST_NAMED,
) -> set[str]:
    """Return the model's entries that the checkpoint lacks: DCP would silently keep their current values.

    Args:
        state_dict_metadata: names in the checkpoint.
        load_state_dict: the state dict to load, with the model's under ``model``, or under ``model<number>`` for each chunk.
        strict: ``IGNORE_ALL`` skips the check; ``RETURN_...`` returns them, ``LOG_...`` also logs them; other values raise.
        max_reported: the most names that the message lists.

    Raises:
        CheckpointingException: the checkpoint lacks entries.

    Ranks: each on its own.
    """
    strict = StrictHandling(strict)
    if strict is StrictHandling.IGNORE_ALL:
        return set()
    stored = set(state_dict_metadata)
    asked = {
        f"{part}.{name}"
        for part, entries in load_state_dict.items()
        if re.fullmatch(r"model\d*", part)
        for name in entries
        if not name.endswith("._extra_state")
    }
    absent = asked - stored
    if not absent or strict in (StrictHandling.RETURN_UNEXPECTED, StrictHandling.RETURN_ALL):
        return absent
    rank = dist.get_rank() if dist.is_initialized() else 0
    more = f" and {len(absent) - max_reported} more" if len(absent) > max_reported else ""
    message = (
        f"the checkpoint at {checkpoint_path} must have all weights that rank {rank} requests, got none for "
        f"{', '.join(sorted(absent)[:max_reported])}{more}; they would keep their initial values. Pass the state dict through "
        "preprocess_fsdp_dtensor_state_dict, or rename the entries"
    )
    if strict in (StrictHandling.LOG_UNEXPECTED, StrictHandling.LOG_ALL):
        logger.warning(message)
        return absent
    raise CheckpointingException(message)


# Only Megatron-FSDP's own tests import this (tests/third_party).
def _intersect_slice(first: slice, second: slice) -> slice:
    """Return the indices that two slices share; empty where they share none."""
    start = max(first.start, second.start)
    return slice(start, max(start, min(first.stop, second.stop)))
