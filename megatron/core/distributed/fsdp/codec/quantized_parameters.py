"""Parameters that are quantised tensors already, as transformer-engine's ``quantized_model_init`` makes them."""

from __future__ import annotations

from torch import nn


def without_quantization(parameter: nn.Parameter) -> nn.Parameter:
    """Return the parameter; in place of a quantised tensor of transformer-engine, a plain one that asks for its codec.

    Its values are those before they were quantised, where they were kept (``preserve_high_precision_init_val``).

    Raises:
        NotImplementedError: no codec serves this kind of tensor.
    """
    if not type(parameter).__module__.startswith("transformer_engine."):
        return parameter
    from megatron.core.extensions.transformer_engine_weights import codec_of_quantized, values_of_quantized

    values = values_of_quantized(parameter).to(parameter.device, parameter.dtype)
    plain = nn.Parameter(values, requires_grad=parameter.requires_grad)
    # What begins with an underscore is the tensor's own.
    own = {key: value for key, value in vars(parameter).items() if not key.startswith("_")}
    plain.__dict__.update(own, fsdp_codec=own.get("fsdp_codec") or codec_of_quantized(parameter))
    return plain
