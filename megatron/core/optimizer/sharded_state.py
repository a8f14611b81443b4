"""An optimizer's state as Megatron-Core's sharded state dict: each tensor lies as its weight does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.distributed.fsdp import make_initial_state

_COMMON_STEP = "common_step"


def sharded_optimizer_state(
    optimizer: torch.optim.Optimizer, model_sharded_state_dict: dict[str, Any], *, is_loading: bool
) -> dict[str, Any]:
    """Return the optimizer's ``state_dict`` with sharded tensors under Megatron-Core's keys, and its steps as one number.

    Args:
        model_sharded_state_dict: of the model, with its parameters as data.
        is_loading: make state that is not there yet, which the load fills.

    Raises:
        ValueError: the optimizer holds a parameter that the model does not; parameters have made different numbers of steps.

    Ranks: each alone.
    """
    if is_loading and not any(optimizer.state.values()) and not make_initial_state(optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} must have made a step before its state is loaded, got none: only torch's Adam, AdamW and SGD "
            "without dampening can be given their state before"
        )
    leaves = {
        id(leaf.data): leaf
        for leaf in nested_values(model_sharded_state_dict)
        if isinstance(leaf, (ShardedTensor, ShardedTensorFactory))
    }
    own = optimizer.state_dict()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    indices = [index for group in own["param_groups"] for index in group["params"]]
    state: dict[Any, Any] = {}
    steps: set[float] = set()
    for index, parameter in zip(indices, parameters, strict=True):
        values = own["state"].get(index, {})
        if values and id(parameter) not in leaves:
            raise ValueError(
                f"model_sharded_state_dict must have each parameter of the optimizer, got none for one of shape "
                f"{list(parameter.shape)}; give it model.sharded_state_dict() of the wrapped model"
            )
        for key, value in values.items():
            if key == "step":
                steps.add(float(value))
                continue
            state.setdefault(index, {})[key] = make_sharded_optimizer_tensor(
                leaves[id(parameter)], value, f"optimizer.state.{key}"
            )
    if len(steps) > 1:
        raise ValueError(f"all parameters must have made the same number of steps, got {sorted(steps)}")
    if steps:
        state[_COMMON_STEP] = steps.pop()
    groups = [{**group, "params": LocalNonpersistentObject(group["params"])} for group in own["param_groups"]]
    return {"state": state, "param_groups": groups}


def with_steps_of_parameters(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a loaded state dict as torch's optimizers have it: with a step for each parameter."""
    state = dict(state_dict["state"])
    step = state.pop(_COMMON_STEP, None)
    if step is not None:
        state = {index: {"step": torch.tensor(float(step)), **values} for index, values in state.items()}
    return {**state_dict, "state": state}
