"""Parameters that transformer-engine's ``quantized_model_init`` made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from megatron.core.distributed.fsdp.buffers.weight_codec import ParameterKind, plain_parameter


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
