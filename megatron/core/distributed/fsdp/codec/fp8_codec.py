"""``Fp8Codec``: weights that rest and travel in one byte for each element, with separate scales.

    from megatron.core.distributed.fsdp import Fp8Codec

    linear.weight.fsdp_codec = Fp8Codec(recipe="tensorwise", wrapper=...)  # before fully_shard

What wraps bytes for transformer-engine's layers is in ``megatron/core/extensions/transformer_engine_weights.py``. Without
the engine the attribute has no effect.

See [Note: weights in bytes].
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from megatron.core.distributed.fsdp.buffers.weight_codec import ParameterKind, plain_parameter
from megatron.core.distributed.fsdp.codec.frozen_weights import FrozenWeights
from megatron.core.distributed.fsdp.codec.scaled_weights import ScaledWeights, WeightScales
from megatron.core.distributed.fsdp.codec.scaling import ScalingCodec


class Fp8Codec(ScalingCodec):
    """Weights in E4M3 bytes, scaled tensor by tensor or block by block.

    Args:
        recipe: ``delayed``: one scale for each weight, from the largest absolute values of earlier steps. ``tensorwise``:
            one, from the weight that is written. ``blockwise``: one for each block of 128 x 128 elements of it.
        wrapper: makes what layers multiply.
        margin: ``delayed`` leaves so many powers of two above the largest value.
        amax_history_len: steps that ``delayed`` looks back.
        amax_compute_algo: what ``delayed`` takes of them: the ``max``, or the ``most_recent``.
        power_of_two: scales are powers of two. None: only for ``blockwise``, as transformer-engine does.
        keeps_derived: keep what layers derive from the bytes (transposes) until the weights change, also while the
            unit is resharded: more memory, fewer transposes.

    Raises:
        ValueError: an argument is none of those above.

    The first scale of a weight is that of its own values, whatever the recipe: weights that were just made or loaded do
    not overflow. Evaluations and further forwards with the same weights change no scale. Weights of all groups of a
    context share one reduction for each version of the weights.
    """

    scales_class = WeightScales

    def weights_class(self, *, trainable: bool) -> type[ScaledWeights]:
        return ScaledWeights if trainable else FrozenWeights


class QuantizedParameters(ParameterKind):
    """Quantised tensors of transformer-engine, which is imported once there is one."""

    def takes(self, parameter: torch.Tensor) -> bool:
        return type(parameter).__module__.startswith("transformer_engine.")

    def plain(self, parameter: nn.Parameter, name: str, module: nn.Module) -> nn.Parameter:
        """Return the values, those before they were quantised where these were kept (``preserve_high_precision_init_val``).

        For a frozen parameter these are the values that its bytes stand for, with the reciprocals of their scales as ``fsdp_inverse``.
        """
        from megatron.core.extensions import transformer_engine_weights as te_weights

        values = te_weights.values_of_quantized(parameter).to(parameter.device, parameter.dtype)
        # Without attributes that its class or maker gave it.
        own = {key: value for key, value in vars(parameter).items() if key[0] != "_"}
        own = {key: value for key, value in own.items() if key not in te_weights.OF_INITIAL_VALUES}
        own.setdefault("fsdp_codec", te_weights.codec_of_quantized(parameter, module))
        if not parameter.requires_grad:
            own["fsdp_inverse"] = te_weights.inverse_of_quantized(parameter)
        return plain_parameter(parameter, values, own)

    @contextmanager
    def keeping_initial_values(self, module: nn.Module) -> Iterator[None]:
        """Let a module of ``quantized_model_init`` keep the values that its weights have before they are quantised."""
        name = "preserve_high_precision_init_val"
        before = vars(module).get(name)
        if before is None:
            yield
            return
        vars(module)[name] = True
        try:
            yield
        finally:
            vars(module)[name] = before

    def forget_initial_values(self, parameter: torch.Tensor) -> None:
        """Free what transformer-engine keeps next to a quantised parameter, and the methods by which it refers to itself."""
        from megatron.core.extensions.transformer_engine_weights import OF_INITIAL_VALUES

        for name in ("_high_precision_init_val", *OF_INITIAL_VALUES):
            vars(parameter).pop(name, None)
