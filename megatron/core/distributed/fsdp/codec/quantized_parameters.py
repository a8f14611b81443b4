"""Parameters that are no plain tensors: those that ``quantized_model_init`` made, and those with hooks of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megatron.core.distributed.fsdp.codec.hooked_tensor import Shell, has_hooks


def plain_of(parameter: nn.Parameter, name: str, module: nn.Module) -> nn.Parameter:
    """Return the parameter; in place of a tensor subclass a plain one that says what its model weight is made by.

    A quantised tensor of transformer-engine (``quantized_model_init``) becomes its values, those before they were quantised
    where they were kept (``preserve_high_precision_init_val``), with an attribute ``fsdp_codec``. A frozen one becomes those
    that its bytes stand for, with the reciprocals of their scales as ``fsdp_inverse``. A tensor with ``fsdp_pre_all_gather``
    becomes what it wraps, with an attribute ``fsdp_shell``.

    Args:
        name: of the parameter, for errors.
        module: that holds it.

    Raises:
        NotImplementedError: no codec serves this kind of tensor.
    """
    if is_quantized(parameter):
        from megatron.core.extensions import transformer_engine_weights as te_weights

        values = te_weights.values_of_quantized(parameter).to(parameter.device, parameter.dtype)
        own = attributes_of(parameter)
        own.setdefault("fsdp_codec", te_weights.codec_of_quantized(parameter, module))
        if not parameter.requires_grad:
            own["fsdp_inverse"] = te_weights.inverse_of_quantized(parameter)
        return _plain(parameter, values, own)
    if has_hooks(parameter):
        shell = Shell(parameter, name, module)
        return _plain(parameter, shell.memory_of(parameter), {**shell.own_attributes(parameter), "fsdp_shell": shell})
    if is_traceable_wrapper_subclass(parameter) and not isinstance(parameter, DTensor):
        raise NotImplementedError(
            f"the {type(parameter).__name__} {name} must be a plain tensor, or of a class with fsdp_pre_all_gather and "
            "fsdp_post_all_gather, since its rows are to be shared by ranks; convert (quantize) the module after training, or pass the "
            "parameter in ignored_params: then each rank keeps it whole, and does not train it"
        )
    return parameter


def is_quantized(parameter: torch.Tensor) -> bool:
    """Return whether the parameter is a quantised tensor of transformer-engine."""
    return type(parameter).__module__.startswith("transformer_engine.")


def attributes_of(parameter: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that a parameter's owner has set, without those that its class or maker gave it."""
    if not is_quantized(parameter):
        return dict(vars(parameter))
    from megatron.core.extensions.transformer_engine_weights import OF_INITIAL_VALUES

    return {key: value for key, value in vars(parameter).items() if key[0] != "_" and key not in OF_INITIAL_VALUES}


def forget_initial_values(parameter: torch.Tensor) -> None:
    """Free what transformer-engine keeps beside a quantised parameter, and the methods by which it refers to itself."""
    if is_quantized(parameter):
        from megatron.core.extensions.transformer_engine_weights import OF_INITIAL_VALUES

        for name in ("_high_precision_init_val", *OF_INITIAL_VALUES):
            vars(parameter).pop(name, None)


@contextmanager
def keeping_initial_values(module: nn.Module) -> Iterator[None]:
    """Within it a module of ``quantized_model_init`` keeps the values that its weights have before they are quantised."""
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


def _plain(parameter: nn.Parameter, values: torch.Tensor, attributes: dict[str, object]) -> nn.Parameter:
    plain = nn.Parameter(values, requires_grad=parameter.requires_grad)
    plain.__dict__.update(attributes)
    return plain
