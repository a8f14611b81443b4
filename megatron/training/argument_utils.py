"""Megatron-LM's import path of configurations that follow from arguments."""

from megatron.training.library.flags import (
    PretrainConfigContainer,
    core_transformer_config_from_args,
    gpt_config_from_args,
    hybrid_config_from_args,
    pretrain_cfg_container_from_args,
)

__all__ = [
    "PretrainConfigContainer",
    "core_transformer_config_from_args",
    "gpt_config_from_args",
    "hybrid_config_from_args",
    "pretrain_cfg_container_from_args",
]
