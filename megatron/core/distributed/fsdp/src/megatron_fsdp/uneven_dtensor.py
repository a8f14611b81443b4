"""Megatron-FSDP's import path of its functions of DTensors."""

from megatron.core.distributed.fsdp.compat.version1 import (
    gather_uneven_dtensor_to_full_tensor,
    preprocess_state_dict_for_uneven_dtensor,
    redistribute_uneven_dtensor_to_replicated,
    uneven_dtensor_to_full_tensor,
)

__all__ = [
    "gather_uneven_dtensor_to_full_tensor",
    "preprocess_state_dict_for_uneven_dtensor",
    "redistribute_uneven_dtensor_to_replicated",
    "uneven_dtensor_to_full_tensor",
]
