"""Sharded state dicts of optimizers, from those of their models: each tensor of the state lies as its weight does."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

Sharded = ShardedTensor | ShardedTensorFactory


def get_param_id_to_sharded_param_map(
    model_sharded_state_dict: ShardedStateDict, optim_params_iter: Iterable[torch.nn.Parameter]
) -> dict[int, Sharded]:
    """Return what a model's sharded state dict has of an optimizer's parameters, by their places in the iteration.

    Args:
        model_sharded_state_dict: with the parameters themselves as data.
    """
    places: dict[int, int] = {}
    for place, parameter in enumerate(optim_params_iter):
        places.setdefault(id(parameter), place)
    sharded, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
    return {places[id(leaf.data)]: leaf for leaf in nested_values(sharded) if id(leaf.data) in places}


def make_sharded_optimizer_tensor(model_param: Sharded, optim_param: torch.Tensor, prefix: str) -> Sharded:
    """Describe a tensor of the state of a parameter: ``prefix``, a dot, and the parameter's key are its key.

    Raises:
        CheckpointingException: its shape is not the parameter's.
    """
    key = f"{prefix}.{model_param.key}"
    if isinstance(model_param, ShardedTensorFactory):
        return replace(model_param, key=key, data=optim_param)
    return replace(model_param, key=key, data=optim_param, dtype=optim_param.dtype)


def optim_state_to_sharding_state(
    optim_state_dict: dict[str, Any],
    id_to_sharded_param_map: Mapping[int, Sharded],
    exclude_keys: Collection[str] = (),
) -> None:
    """Describe the state of parameters in an optimizer's ``state_dict``, in place.

    Args:
        id_to_sharded_param_map: of ``get_param_id_to_sharded_param_map``.
        exclude_keys: keys of the state to leave out.

    Raises:
        ValueError: the map lacks a parameter.
    """
    sharded: dict[int, dict[str, Sharded]] = {}
    for place, values in optim_state_dict["state"].items():
        kept = {key: value for key, value in values.items() if key not in exclude_keys}
        if kept and place not in id_to_sharded_param_map:
            raise ValueError(f"id_to_sharded_param_map must have all parameters with state, got none for {place}")
        sharded[place] = {
            key: make_sharded_optimizer_tensor(id_to_sharded_param_map[place], value, f"optimizer.state.{key}")
            for key, value in kept.items()
        }
    optim_state_dict["state"] = sharded
    optim_state_dict["param_groups"] = [
        {**group, "params": LocalNonpersistentObject(group["params"])} for group in optim_state_dict["param_groups"]
    ]
