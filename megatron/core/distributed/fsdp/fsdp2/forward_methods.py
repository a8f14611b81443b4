"""Other methods than forward that compute with a unit's weights: ``encode``, ``get_text_features`` and the like.

A method runs as a forward of the unit does: weights are unsharded around it, its inputs and outputs are cast to the policy's dtypes,
and its backward is the unit's. Inside of a forward of the unit it is a plain call.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from megatron.core.distributed.fsdp.api.module import FsdpModule, items_of, run_as_forward
from megatron.core.distributed.fsdp.config.mixed_precision import MixedPrecisionPolicy
from megatron.core.distributed.fsdp.fsdp2.casts import cast_tensors

# Methods that compute with weights in the libraries of the field (transformers, timm, diffusers, open_clip).
KNOWN_METHODS = (
    "decode",
    "encode",
    "encode_audio",
    "encode_image",
    "encode_text",
    "forward_features",
    "forward_head",
    "get_audio_features",
    "get_image_features",
    "get_text_features",
    "get_video_features",
)
# How deep arguments of such a method are searched for a tensor.
_MAX_DEPTH = 8


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method of a sharded module compute with whole weights, as its forward does; nothing for other modules.

    Raises:
        ValueError: the module has no method of this name.

    Ranks: all of the mesh, with the same name; they call the method together from then on.
    """
    if not isinstance(module, FsdpModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module)} does not have a method {method_name}")
    module.__dict__[method_name] = _ForwardMethod(module, getattr(module, method_name), always=True)


def register_known_methods(modules: Sequence[nn.Module]) -> None:
    """Register the methods of ``KNOWN_METHODS`` that the modules' classes define; a call without a tensor is a plain call."""
    for module in modules:
        for name in _known_methods_of(type(module)):
            if name not in module.__dict__:
                module.__dict__[name] = _ForwardMethod(module, getattr(module, name), always=False)


# By class, since a static look-up of a name takes long, and a model has many modules of a class.
_known_methods: weakref.WeakKeyDictionary[type, list[str]] = weakref.WeakKeyDictionary()


def _known_methods_of(cls: type) -> list[str]:
    if cls not in _known_methods:
        found = {name: inspect.getattr_static(cls, name, None) for name in KNOWN_METHODS}  # a static method is none
        _known_methods[cls] = [name for name, method in found.items() if isinstance(method, types.FunctionType)]
    return _known_methods[cls]


class _ForwardMethod:
    """A method that runs as a forward of its module's unit."""

    def __init__(self, module: FsdpModule | nn.Module, method: Callable[..., Any], *, always: bool) -> None:
        functools.update_wrapper(self, method)
        del self.__dict__["__wrapped__"]  # it holds the module
        self._module, self._always = weakref.ref(module), always
        self._function = getattr(method, "__func__", None)
        self._method = method if self._function is None else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module()
        call = self._method if self._function is None else functools.partial(self._function, module)
        assert module is not None and call is not None, "called through the module"
        unit, recomputes = module._fsdp_unit, torch._C._current_graph_task_id() != -1
        if (unit.forward_depth and not recomputes) or not (self._always or _has_tensor((args, kwargs))):
            return call(*args, **kwargs)
        return run_as_forward(
            module, functools.partial(_call_with_casts, call, module._fsdp_unit.origin.policy), args, kwargs
        )


def _call_with_casts(call: Callable[..., Any], policy: MixedPrecisionPolicy, *args: Any, **kwargs: Any) -> Any:
    """Call with inputs and output in the policy's dtypes, as hooks do around forward."""
    if policy.param_dtype is not None and policy.cast_forward_inputs:
        args, kwargs = cast_tensors((args, kwargs), policy.param_dtype)
    output = call(*args, **kwargs)
    return output if policy.output_dtype is None else cast_tensors(output, policy.output_dtype)


def _has_tensor(value: Any, depth: int = 0) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    return depth < _MAX_DEPTH and any(_has_tensor(item, depth + 1) for item in items_of(value))
