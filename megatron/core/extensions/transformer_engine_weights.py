"""Weights that rest and travel in one byte, as transformer-engine's layers multiply them.

    weight.fsdp_codec = te_weight_codec("tensorwise")  # before fully_shard

A layer then finds a ``Float8Tensor`` (``Float8BlockwiseQTensor`` where blocks are scaled) whose bytes and scales are views
of the engine's buffers. On GPUs whose GEMMs need the transposed bytes, the layer makes them in backward, and the engine drops
them when the unit is resharded or its weights change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.distributed.fsdp.codec.fp8_codec import Fp8Codec

# What layers derive from the bytes, and its values where there is nothing.
_OF_TENSORS: Mapping[str, Any] = {"_transpose": None, "_transpose_invalid": True}
_OF_BLOCKS: Mapping[str, Any] = {"_columnwise_data": None, "_columnwise_scale_inv": None}


def te_weight_codec(recipe: Any, **settings: Any) -> Fp8Codec:
    """Return the codec of transformer-engine's layers for weights.

    Args:
        recipe: ``delayed``, ``tensorwise`` or ``blockwise``; the one in which the layer multiplies.
        settings: further arguments of ``Fp8Codec``.
    """
    return Fp8Codec(recipe=recipe, wrapper=TransformerEngineWrapper(recipe == "blockwise"), **settings)


_RECIPES = {
    "Float8Quantizer": "delayed",
    "Float8CurrentScalingQuantizer": "tensorwise",
    "Float8BlockQuantizer": "blockwise",
}


def codec_of_quantized(tensor: Any, module: Any) -> Fp8Codec:
    """Return the codec of a weight of ``module`` that ``quantized_model_init`` made.

    Raises:
        NotImplementedError: its quantiser is none of those for E4M3 with one scale, or with one for each 128 x 128 elements.
    """
    from megatron.core.extensions.transformer_engine_layers import te

    quantizer = tensor._quantizer
    recipe = _RECIPES.get(type(quantizer).__name__)
    if (
        recipe is None
        or tensor._fp8_dtype != te.DType.kFloat8E4M3
        or (recipe == "blockwise" and not tensor._is_2D_scaled)
    ):
        raise NotImplementedError(
            f"weights must be quantised to E4M3 with one of {', '.join(_RECIPES)} (in two dimensions) to be sharded in FP8, got a "
            f"{type(quantizer).__name__} for {tensor._fp8_dtype!r}; use another recipe, or make the module outside of quantized_model_init"
        )
    if recipe != "delayed":
        return te_weight_codec(recipe, power_of_two=quantizer.force_pow_2_scales)
    used = getattr(module, "fp8_meta", {}).get("recipe")
    names = ("margin", "amax_history_len", "amax_compute_algo")
    return te_weight_codec(recipe, **{name: getattr(used, name) for name in names if hasattr(used, name)})


def values_of_quantized(tensor: Any) -> torch.Tensor:
    """Return the values of a weight that ``quantized_model_init`` made: of a frozen one those of its bytes.

    Of others those from before they were quantised, where they were kept.
    """
    kept = getattr(tensor, "get_high_precision_init_val", lambda: None)() if tensor.requires_grad else None
    values: torch.Tensor = tensor.dequantize() if kept is None else kept
    return values.detach()


def inverse_of_quantized(tensor: Any) -> torch.Tensor:
    """Return the reciprocals of the scales of a weight that ``quantized_model_init`` made."""
    inverse: torch.Tensor = tensor._rowwise_scale_inv if hasattr(tensor, "_rowwise_scale_inv") else tensor._scale_inv
    return inverse.detach()


# Attributes that ``quantized_model_init`` gives a weight, for values that are of no use once it is sharded.
OF_INITIAL_VALUES = ("get_high_precision_init_val", "clear_high_precision_init_val")


@dataclass(frozen=True)
class TransformerEngineWrapper:
    """The ``Fp8Wrapper`` of transformer-engine's quantised tensors.

    Args:
        scales_blocks: the tensors have a scale for each block of 128 x 128 elements, else one.
    """

    scales_blocks: bool

    @property
    def derived(self) -> Mapping[str, Any]:
        return _OF_BLOCKS if self.scales_blocks else _OF_TENSORS

    def wrap(self, data: torch.Tensor, inverse: torch.Tensor, *, codec: Fp8Codec, dtype: torch.dtype) -> torch.Tensor:
        from megatron.core.extensions.transformer_engine_layers import te

        e4m3, device = te.DType.kFloat8E4M3, data.device
        common = {"shape": data.shape, "dtype": dtype, "fp8_dtype": e4m3, "requires_grad": False, "device": device}
        if self.scales_blocks:
            blocks = te.Float8BlockQuantizer(
                fp8_dtype=e4m3, rowwise=True, columnwise=False, force_pow_2_scales=codec.scales_by_powers_of_two
            )
            wrapped: torch.Tensor = te.Float8BlockwiseQTensor(
                rowwise_data=data,
                rowwise_scale_inv=inverse,
                columnwise_data=None,
                columnwise_scale_inv=None,
                quantizer=blocks,
                is_2D_scaled=True,
                **common,
            )
            return wrapped
        if codec.recipe == "delayed":
            one = torch.ones(1, device=device)
            quantizer = te.Float8Quantizer(scale=one, amax=torch.zeros_like(one), fp8_dtype=e4m3)
        else:
            quantizer = te.Float8CurrentScalingQuantizer(
                fp8_dtype=e4m3, device=device, force_pow_2_scales=codec.scales_by_powers_of_two
            )
        # Layers would make the transpose in forward, and again in backward if the unit was resharded between.
        quantizer.set_usage(rowwise=True, columnwise=False)
        wrapped = te.Float8Tensor(data=data, fp8_scale_inv=inverse, data_transpose=None, quantizer=quantizer, **common)
        return wrapped

    def rebind(
        self, wrapped: torch.Tensor, *, data: torch.Tensor | None = None, inverse: torch.Tensor | None = None
    ) -> None:
        names = ("_rowwise_data", "_rowwise_scale_inv") if self.scales_blocks else ("_data", "_scale_inv")
        for name, tensor in zip(names, (data, inverse), strict=True):
            if tensor is not None:
                setattr(wrapped, name, tensor)
