"""Megatron-FSDP's import path of version 2's parameter groups."""

from megatron.core.distributed.fsdp.src.version2 import (
    FsdpParameter,
    FsdpParameterGroup,
    get_containing_parameter_group,
    sync_model_weights_from_main_weights,
)

__all__ = [
    "FsdpParameter",
    "FsdpParameterGroup",
    "get_containing_parameter_group",
    "sync_model_weights_from_main_weights",
]
