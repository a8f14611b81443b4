"""Parameters that are no plain tensors: those that ``quantized_model_init`` made, and those with hooks of their own."""

from __future__ import annotations

import torch
from torch import nn

from megatron.core.distributed.fsdp.codec.hooked_tensor import Shell, has_hooks


def plain_of(parameter: nn.Parameter, name: str, module: nn.Module) -> nn.Parameter:
    """Return the parameter; in place of a tensor subclass a plain one that says what its model weight is made by.

    A quantised tensor of transformer-engine (``quantized_model_init``) becomes its values, those before they were quantised
    where they were kept (``preserve_high_precision_init_val``), with an attribute ``fsdp_codec``. A tensor with
    ``fsdp_pre_all_gather`` becomes what it wraps, with an attribute ``fsdp_shell``.

    Args:
        name: of the parameter, for errors.
        module: that holds it.

    Raises:
        NotImplementedError: no codec serves this kind of tensor.
    """
    if type(parameter).__module__.startswith("transformer_engine."):
        from megatron.core.extensions.transformer_engine_weights import codec_of_quantized, values_of_quantized

        values = values_of_quantized(parameter).to(parameter.device, parameter.dtype)
        # What begins with an underscore is the tensor's own.
        own = {key: value for key, value in vars(parameter).items() if not key.startswith("_")}
        return _plain(parameter, values, {**own, "fsdp_codec": own.get("fsdp_codec") or codec_of_quantized(parameter)})
    if has_hooks(parameter):
        shell = Shell(parameter, name, module)
        return _plain(parameter, shell.memory_of(parameter), {**shell.own_attributes(parameter), "fsdp_shell": shell})
    return parameter


def _plain(parameter: nn.Parameter, values: torch.Tensor, attributes: dict[str, object]) -> nn.Parameter:
    plain = nn.Parameter(values, requires_grad=parameter.requires_grad)
    plain.__dict__.update(attributes)
    return plain
