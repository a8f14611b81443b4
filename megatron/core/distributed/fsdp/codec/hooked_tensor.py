"""Parameters whose class defines how they are gathered, by FSDP2's protocol for tensor subclasses.

A tensor subclass with ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``, such as the weights of torchao's float8 linears,
makes what is gathered of its shard, and what is multiplied of what was gathered. Its sharded parameter is a DTensor whose
local tensor is of the same subclass, over this rank's part of the main weight, so that code which sets attributes on the
shards, such as torchao's ``precompute_float8_dynamic_scale_for_fsdp``, works.

Source: the extension protocol of ``torch.distributed.fsdp.fully_shard`` (its ``_fsdp_param.py`` and torchao's
``float8/fsdp_utils.py``).

See [Note: parameters with hooks].
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy as Fsdp2Policy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megatron.core.distributed.fsdp.codec.resting_bytes import FrozenWeight
from megatron.core.distributed.fsdp.codec.weight_codec import WeightCodec
from megatron.core.distributed.fsdp.config.mixed_precision import GroupDtypes

_HOOKS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


def has_hooks(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's class follows the protocol, or tries to."""
    return type(tensor) not in (torch.Tensor, nn.Parameter) and any(hasattr(type(tensor), hook) for hook in _HOOKS)


class Shell:
    """A subclass without its values: makes tensors of it over other memory.

    Args:
        parameter: of the subclass, which must wrap one tensor of its own shape and dtype, and must be made anew by
            ``__tensor_flatten__`` and ``__tensor_unflatten__``.
        name: of the parameter, for errors.
        module: that holds it.

    Raises:
        NotImplementedError: the subclass is no such wrapper, or lacks a hook.
    """

    def __init__(self, parameter: Any, name: str, module: nn.Module) -> None:
        kind: Any = type(parameter)
        self.name, self._kind, self._module = name, kind, weakref.ref(module)
        missing = [hook for hook in _HOOKS if not hasattr(kind, hook)]
        if missing:
            raise NotImplementedError(f"{self} must have both {' and '.join(_HOOKS)}, got no {missing[0]}")
        if not (hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")):
            raise NotImplementedError(
                f"{self} must have __tensor_flatten__ and __tensor_unflatten__, by which its shards are made, got none; add them"
            )
        inner, self._context = parameter.__tensor_flatten__()
        same = [key for key in inner if _alike(getattr(parameter, key), parameter)]
        if len(same) != 1 or parameter.dim() == 0:
            raise NotImplementedError(
                f"{self} must hold one tensor of its own shape and dtype, whose rows ranks share, got {inner} in a tensor of shape "
                f"{list(parameter.shape)}; convert the parameter after training, or leave this module unsharded"
            )
        self._key = same[0]
        self._others = {key: getattr(parameter, key) for key in inner if key != self._key}
        self._takes_all = len(inspect.signature(kind.fsdp_pre_all_gather).parameters) > 2
        self._own = {*vars(self.over(self.memory_of(parameter))), "_is_param"}

    def __str__(self) -> str:
        return f"the {self._kind.__name__} {self.name}"

    def own_attributes(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return the parameter's attributes that are not its class's."""
        return {key: value for key, value in vars(parameter).items() if key not in self._own}

    def over(self, memory: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
        """Return a tensor of the subclass over ``memory``, with the other attributes of ``like``."""
        inner = {self._key: memory, **self._others}
        made: torch.Tensor = self._kind.__tensor_unflatten__(inner, self._context, memory.shape, memory.stride())
        if like is not None:
            vars(made).update((key, value) for key, value in vars(like).items() if key != self._key)
        return made

    def memory_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the plain tensor in one of the subclass."""
        memory: torch.Tensor = getattr(tensor, self._key)
        return memory.detach()

    # ---- the hooks ----------------------------------------------------------------------------------------------

    def before_gather(
        self, shard: torch.Tensor, mesh: DeviceMesh, shape: torch.Size, dtypes: GroupDtypes
    ) -> tuple[torch.Tensor, Any]:
        """Return what is gathered of a shard, of its shape, and what else the unsharded tensor is made of.

        A shard without rows shows the hook one row of zeros, as FSDP2 pads, since maxima of nothing are errors.

        Ranks: all of the mesh.
        """
        is_empty = shard.numel() == 0
        if is_empty:
            row = self.memory_of(shard).new_zeros((1, *shape[1:]))
            shard = self.over(row, shard)
        hook = shard.fsdp_pre_all_gather  # type: ignore[attr-defined]
        if self._takes_all:
            stride = torch.empty(shape, device="meta").stride()
            inputs, metadata = hook(mesh, shape, stride, self._module(), _policy(dtypes))
        else:
            inputs, metadata = hook(mesh)
        shapes = [list(tensor.shape) for tensor in inputs]
        if len(inputs) != 1 or inputs[0].numel() != shard.numel():
            raise NotImplementedError(
                f"fsdp_pre_all_gather of {self} must return one tensor with an element for each of the shard's, got "
                f"{shapes} of a shard of {list(shard.shape)}; ranks hold unequal parts, which other tensors would not follow"
            )
        return (inputs[0][:0] if is_empty else inputs[0]), metadata


def _alike(inner: Any, outer: torch.Tensor) -> bool:
    return isinstance(inner, torch.Tensor) and inner.shape == outer.shape and inner.dtype == outer.dtype


def _policy(dtypes: GroupDtypes) -> Fsdp2Policy:
    return Fsdp2Policy(param_dtype=dtypes.compute, reduce_dtype=dtypes.grad_comm)


def memory_of(tensor: torch.Tensor, *, writes: bool = True) -> torch.Tensor:
    """Return the plain tensor that holds a shard's values: the tensor itself, or the one that a subclass wraps.

    Args:
        writes: it may be written. Else a tensor that computes its values when it is read stays what it is.
    """
    if isinstance(tensor, FrozenWeight):
        return tensor.fsdp_memory() if writes else tensor
    while type(tensor) is not torch.Tensor and is_traceable_wrapper_subclass(tensor):
        inner = [getattr(tensor, key) for key in tensor.__tensor_flatten__()[0]]
        tensor = next(each for each in inner if _alike(each, tensor))
    return tensor


def leaves_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors with memory of their own of which a wrapper subclass consists; the tensor itself if it is none."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for key in tensor.__tensor_flatten__()[0]:
        yield from leaves_of(getattr(tensor, key))


@dataclass(frozen=True, kw_only=True)
class HookCodec(WeightCodec):
    """What a parameter's own hooks make: bytes for each element, or another dtype.

    Args:
        rest: dtype of what rests and travels.
        seen: the dtype in which the hooks made it, of as many bytes.
        shell: of this parameter.
    """

    rest: torch.dtype
    seen: torch.dtype
    shell: Shell = field(compare=False)

    casts = False
    needs_all_main_weights = True

    def rest_dtype(self, compute: torch.dtype) -> torch.dtype:
        return self.rest


def hook_codec(
    shell: Shell, parameter: torch.Tensor, mesh: DeviceMesh, dtypes: GroupDtypes, device: torch.device
) -> HookCodec:
    """Find out what the hooks make, by a row of zeros in the main weight's dtype. Ranks: all of the mesh."""
    shard = shell.over(torch.zeros((0, *parameter.shape[1:]), dtype=dtypes.main_params, device=device))
    seen = shell.before_gather(shard, mesh, parameter.shape, dtypes)[0].dtype
    return HookCodec(rest=torch.uint8 if seen.itemsize == 1 else seen, seen=seen, shell=shell)
