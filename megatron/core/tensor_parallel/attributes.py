"""Attributes of parameters that say how they are split over tensor-parallel ranks."""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup

from megatron.core.process_groups_config import DEFAULT_GROUP, group_or_default, group_rank

_DEFAULTS = {"tensor_model_parallel": False, "partition_dim": -1, "partition_stride": 1}


def set_tensor_model_parallel_attributes(tensor: torch.Tensor, is_parallel: bool, dim: int, stride: int) -> None:
    """Say how a parameter is split.

    Raises:
        AssertionError: that was said already.
    """
    if any(hasattr(tensor, name) for name in _DEFAULTS):
        raise AssertionError("how a parameter is split must be said once, got a parameter with such attributes")
    for name, value in zip(_DEFAULTS, (is_parallel, dim, stride), strict=True):
        setattr(tensor, name, value)


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: torch.Tensor) -> None:
    """Say that a parameter is not split, where nothing says otherwise."""
    for name, value in _DEFAULTS.items():
        if not hasattr(tensor, name):
            setattr(tensor, name, value)


def copy_tensor_model_parallel_attributes(destination_tensor: torch.Tensor, source_tensor: torch.Tensor) -> None:
    """Say of one parameter what is said of another."""
    for name in _DEFAULTS:
        if hasattr(source_tensor, name):
            setattr(destination_tensor, name, getattr(source_tensor, name))


def param_is_not_tensor_parallel_duplicate(
    param: torch.Tensor,
    tp_group: ProcessGroup | None = DEFAULT_GROUP,
    expert_tp_group: ProcessGroup | None = DEFAULT_GROUP,
) -> bool:
    """Return whether this tensor-parallel rank is the one that counts a parameter: each of a split one, the first of others."""
    if getattr(param, "tensor_model_parallel", False):
        return True
    is_expert = not getattr(param, "allreduce", True)
    group = group_or_default(expert_tp_group, "expt_tp") if is_expert else group_or_default(tp_group, "tp")
    return group_rank(group) == 0
