"""Megatron-FSDP's names of a sharded module, and its policy of dtypes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from megatron.core.distributed.fsdp.api.module import FsdpModule, find_context, tensors_to_watch
from megatron.core.distributed.fsdp.config.mixed_precision import GroupDtypes, MixedPrecisionPolicy


class Phase(Enum):
    """What a unit is doing."""

    RESTING = "resting"
    FORWARD = "forward"
    BACKWARD = "backward"


class _Fallback:
    """A name of a sharded module: return our value unless the module defines this name itself.

    Not a property: those come before what a module has, and users' modules have such names. What a module's class has under such a
    name, ``MegatronModule`` puts into the unit's class.
    """

    def __init__(self, value: Callable[[Any], Any], *, of_class: Any = None) -> None:
        self._value, self._of_class = value, of_class

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, module: Any, owner: type) -> Any:
        if module is None:
            return self._of_class or self
        for own in (module._parameters, module._buffers, module._modules):
            if self._name in own:
                return own[self._name]
        return self._value(module)


class MegatronModule(FsdpModule if TYPE_CHECKING else object):  # type: ignore[misc]
    """Names of Megatron-FSDP's modules. What a module has under them itself comes first. FSDP2 adds none of them."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Put what the module's own class has under these names before ours: properties with setters among them."""
        super().__init_subclass__(**kwargs)
        for name, ours in vars(MegatronModule).items():
            own = inspect.getattr_static(cls.__bases__[-1], name, ours) if isinstance(ours, _Fallback) else ours
            if own is not ours:
                setattr(cls, name, own)

    parameter_groups: Any = _Fallback(lambda module: module._fsdp_groups)
    name = _Fallback(lambda module: _name_in_root(module))
    context = _Fallback(lambda module: find_context(module))
    is_root = _Fallback(lambda module: partial(_is_root, module))
    phase = _Fallback(lambda module: _phase(module))
    pre_forward = _Fallback(lambda module: partial(_pre_forward, module))
    post_forward = _Fallback(lambda module: partial(_post_forward, module))
    pre_backward = _Fallback(lambda module: partial(_pre_backward, module))
    post_backward = _Fallback(lambda module: partial(_post_backward, module))
    Phase = _Fallback(lambda module: Phase, of_class=Phase)


def _phase(module: FsdpModule) -> Phase:
    """Return what the module's unit is doing."""
    unit = module._fsdp_unit
    if unit.context is not None and unit.context.backward.uses(unit):
        return Phase.BACKWARD
    return Phase.FORWARD if unit.forward_depth else Phase.RESTING


def _is_root(module: FsdpModule) -> bool:
    """Return whether the module is in no other sharded module."""
    unit = module._fsdp_unit
    # In a shared context the first part of a prefix names the root.
    return "." not in unit.name if find_context(module).is_shared else unit.prefix == ""


def _name_in_root(module: FsdpModule) -> str:
    """Return the module's name within the topmost sharded module; of that itself, ''."""
    if _is_root(module):
        return ""
    name = module._fsdp_unit.name
    return name.partition(".")[2] if find_context(module).is_shared else name


def _pre_forward(module: FsdpModule) -> None:
    """Run the pre-forward step, for code that computes with the module's weights without calling it. Ranks: all."""
    find_context(module).enter_forward(module._fsdp_unit)


def _post_forward(module: FsdpModule, output: Any = None) -> None:
    """Run the post-forward step.

    Args:
        output: what was computed, through which a backward reaches the module.
    """
    context, tensors = find_context(module), tensors_to_watch(output, module._fsdp_unit)
    recomputes = torch._C._current_graph_task_id() != -1
    (context.leave_recomputation if recomputes else context.leave_forward)(module._fsdp_unit, tensors)


def _pre_backward(module: FsdpModule) -> None:
    """Unshard the module for its backward. Call it during a backward. Ranks: all."""
    if torch._C._current_graph_task_id() == -1:
        raise RuntimeError(
            "pre_backward must be called within a backward, got a call outside of any; call unshard() to compute with the weights"
        )
    find_context(module).begin_unit_backward(module._fsdp_unit)


def _post_backward(module: FsdpModule) -> None:
    """Reshard the module and reduce its gradients, if its backward is running. Ranks: all."""
    find_context(module).backward.finish(module._fsdp_unit)


@dataclass(frozen=True)
class MegatronFsdpPolicy(MixedPrecisionPolicy):
    """A policy with Megatron-FSDP's meaning of None: gradients have the compute dtype by default.

    Args:
        version: of Megatron-FSDP. By default, version 1 communicates gradients in ``main_grads_dtype``, and version 2 in
            the parameter's dtype. In version 2, ``main_params_dtype=None`` means fp32.
    """

    version: int = 1

    @classmethod
    def of(cls, policy: MixedPrecisionPolicy | None, version: int) -> MegatronFsdpPolicy:
        """Return the policy with the meaning of None in ``version``."""
        given = policy or MixedPrecisionPolicy()
        dtypes = {field.name: getattr(given, field.name) for field in fields(MixedPrecisionPolicy)}
        return cls(**dtypes, version=version)

    def resolve(self, own_dtype: torch.dtype, *, trainable: bool) -> GroupDtypes:
        """Return the dtypes of a group whose parameters have ``own_dtype``."""
        dtypes = super().resolve(own_dtype, trainable=trainable)
        if not trainable:
            return dtypes
        main_grads = self.main_grads_dtype or dtypes.compute
        if self.version == 1:
            return replace(dtypes, main_grads=main_grads, grad_comm=self.grad_comm_dtype or main_grads)
        return replace(dtypes, main_params=self.main_params_dtype or torch.float32, main_grads=main_grads)
