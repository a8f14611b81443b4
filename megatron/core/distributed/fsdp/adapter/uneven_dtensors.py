"""Megatron-FSDP's functions of DTensors with uneven rows; here placements know their rows, so DTensor's own methods serve."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate


def preprocess_state_dict_for_uneven_dtensor(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict: DCP asks placements for their rows."""
    return state_dict


def uneven_dtensor_to_full_tensor(dtensor: DTensor) -> torch.Tensor:
    """Return the whole tensor. Ranks: all of the mesh."""
    return dtensor.full_tensor()


def redistribute_uneven_dtensor_to_replicated(dtensor: DTensor) -> DTensor:
    """Return a DTensor of which each rank has all. Ranks: all of the mesh."""
    return dtensor.redistribute(placements=[Replicate()] * dtensor.device_mesh.ndim)


gather_uneven_dtensor_to_full_tensor = redistribute_uneven_dtensor_to_replicated
