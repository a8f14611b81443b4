"""Megatron-Core's settings of FP8 weights, handed to the codecs that the weights ask for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.fsdp.codec.fp8_codec import Fp8Codec


def follow_fp8_settings(config: Any, ddp_config: DistributedDataParallelConfig, module: nn.Module) -> None:
    """Check that the model has the weights that the settings are for, and set their codecs.

    Args:
        config: the model's ``TransformerConfig``.

    Raises:
        ValueError: weights should be gathered in FP8, and the model was not built with such weights.
    """
    if not ddp_config.fp8_param_gather:
        return
    if not getattr(config, "fp8_param", False):
        raise ValueError(
            "fp8_param_gather=True must come with weights in FP8, got a TransformerConfig with fp8_param=False; set it, with fp8, "
            "or leave fp8_param_gather out"
        )
    if ddp_config.keep_fp8_transpose_cache:
        for parameter in module.parameters():
            codec: Any = getattr(parameter, "fsdp_codec", None)
            if isinstance(codec, Fp8Codec):
                parameter.fsdp_codec = replace(codec, keeps_derived=True)  # type: ignore[attr-defined]
