"""``FusedAdam`` of apex and of transformer-engine on sharded parameters.

Their kernels take lists of tensors and read addresses. A DTensor has none (apex's kernels would write to address 0), so they
are given the parts that this rank holds. Parts without elements are left out: apex's kernels forget what they were to launch
if the last tensor is empty.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from itertools import compress
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.dtensor.uneven_dtensor import placed_like

_APEX, _TE = "apex", "transformer_engine"
_PUBLIC = {_APEX: "apex.optimizers", _TE: "transformer_engine.pytorch.optimizers"}


def prepare_fused_adam(optimizer: torch.optim.Optimizer, groups: Sequence[FsdpParameterGroup]) -> None:
    """Let a ``FusedAdam`` step on parameters of these groups; other optimizers are left alone, a prepared one too.

    Raises:
        NotImplementedError: it has settings that would do nothing or harm here, or it is another optimizer of apex.
    """
    cls = _class_of_library(optimizer)
    if cls is None or not groups:
        return
    library = cls.__module__.partition(".")[0]
    if cls.__name__ != "FusedAdam":
        if library == _APEX:
            raise NotImplementedError(
                f"apex's {cls.__name__} does not know sharded parameters, got {groups[0]}; use apex.optimizers.FusedAdam, "
                "torch.optim or FlatAdamW"
            )
        return
    _check_settings(optimizer, library, groups)
    if library == _APEX:
        _list_masters(optimizer)
    if any(isinstance(value, _LocalKernel) for value in vars(optimizer).values()):
        return
    for name, value in list(vars(optimizer).items()):
        if name.startswith("multi_tensor_"):
            setattr(optimizer, name, _LocalKernel(value))
    optimizer.register_step_pre_hook(_settle_rates)
    if library == _APEX:
        optimizer.zero_grad = functools.partial(_zero_grad, weakref.ref(optimizer))  # type: ignore[method-assign]
    elif hasattr(optimizer, "_apply_scale"):
        optimizer._apply_scale = functools.partial(_scale_unless_empty, weakref.WeakMethod(optimizer._apply_scale))


def _class_of_library(optimizer: torch.optim.Optimizer) -> type | None:
    """Return the optimizer's class of apex or transformer-engine, which it is or extends. Neither is imported."""
    return next((cls for cls in type(optimizer).__mro__ if cls.__module__.partition(".")[0] in _PUBLIC), None)


def _check_settings(optimizer: Any, library: str, groups: Sequence[FsdpParameterGroup]) -> None:
    name = f"{_PUBLIC[library]}.FusedAdam"
    dtypes = {group.training.dtypes.main_params for group in groups}
    problems = [
        (
            getattr(optimizer, "master_weights", False) and torch.float32 in dtypes,
            "(master_weights=True) would keep a second fp32 copy of main weights, which are fp32 already; leave it out",
        ),
        (
            library == _APEX and dtypes != {torch.float32},
            f" keeps fp32 state, which loads for the dtype of main weights, got {sorted(map(str, dtypes))}; use fp32 main weights "
            "(MixedPrecisionPolicy(main_params_dtype=torch.float32), the default)",
        ),
        (
            getattr(optimizer, "use_decoupled_grad", False),
            "(use_decoupled_grad=True) reads parameter.decoupled_grad, which sharded parameters do not have, and would train "
            "nothing; leave it out: gradients in another dtype than main weights are cast for the step",
        ),
    ]
    for is_problem, message in problems:
        if is_problem:
            raise NotImplementedError(name + message)


def _list_masters(optimizer: Any) -> None:
    """Add what apex's step wants for each param group, and skips those without, which were added later."""
    masters = optimizer.param_groups_master
    for group in optimizer.param_groups[len(masters) :]:
        masters.append({"params": [None] * len(group["params"])})


class _LocalKernel:
    """A kernel over lists of tensors that is given this rank's parts of DTensors."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __call__(
        self, chunk_size: int, noop: torch.Tensor, lists: Sequence[Sequence[torch.Tensor]], *args: Any
    ) -> None:
        local = [[t._local_tensor if isinstance(t, DTensor) else t for t in tensors] for tensors in lists]
        held = [tensor.numel() > 0 for tensor in local[0]]
        if not all(held):
            local = [list(compress(tensors, held)) for tensors in local]
        if local[0]:
            self._kernel(chunk_size, noop, local, *args)


def _settle_rates(optimizer: Any, *_: Any) -> None:
    """Make rates and counts of steps numbers, or tensors on the device if ``capturable``, whatever a load has left there."""
    for group in optimizer.param_groups:
        for key, dtype in (("lr", torch.float32), ("step", torch.int32)):
            value = group.get(key)
            if value is None or not group["params"]:
                continue
            if not optimizer.capturable:
                group[key] = value.item() if isinstance(value, torch.Tensor) else value
                continue
            device = group["params"][0].device
            if not isinstance(value, torch.Tensor) or value.device != device:
                shape = (1,) if key == "step" else ()
                group[key] = torch.as_tensor(value, dtype=dtype).reshape(shape).to(device)


def _zero_grad(ref: weakref.ref[torch.optim.Optimizer], set_to_none: bool | None = None) -> None:
    """Clear gradients; apex's own function has no argument, which callers of ``torch.optim`` pass."""
    optimizer = ref()
    assert optimizer is not None
    if set_to_none is None:
        type(optimizer).zero_grad(optimizer)
    else:
        torch.optim.Optimizer.zero_grad(optimizer, set_to_none=set_to_none)


def _scale_unless_empty(
    method: Any, name: str, unscaled: torch.Tensor, scaled: torch.Tensor, scale: torch.Tensor
) -> None:
    """Round state to its dtype; that of transformer-engine needs a largest element."""
    if unscaled.numel():
        method()(name, unscaled, scaled, scale)


# ---- state in other dtypes ------------------------------------------------------------------------------------------


class FusedAdamState:
    """Reads and writes the state of transformer-engine's ``FusedAdam``, which may be scaled, in few bits."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def decoded_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return a parameter's state by name, in fp32 (remainders of main weights in int16), placed like the parameter."""
        optimizer = self._optimizer
        return {
            key: placed(parameter, optimizer.get_unscaled_state(parameter, key))
            for key in optimizer.state.get(parameter, {})
        }

    def set_decoded_state(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Replace a parameter's state by these tensors, in the dtypes in which the optimizer keeps it."""
        optimizer = self._optimizer
        for key in [key for key in optimizer.state.get(parameter, {}) if key not in state]:
            del optimizer.state[parameter][key]
        for key, value in state.items():
            optimizer.set_scaled_state(parameter, key, value._local_tensor if isinstance(value, DTensor) else value)

    def decoded_dtypes(self, parameter: torch.Tensor) -> dict[str, torch.dtype]:
        """Return the dtypes of ``decoded_state`` by name, also of a parameter that has no state yet."""
        optimizer = self._optimizer
        in_remainders = optimizer.store_param_remainders and parameter.dtype == torch.bfloat16
        dtypes = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}
        if optimizer.master_weights:
            dtypes["master_param"] = torch.int16 if in_remainders else torch.float32
        return dtypes


def state_of_fused_adam(optimizer: torch.optim.Optimizer) -> FusedAdamState | None:
    """Return what reads and writes the optimizer's state, if that is to be done by its own methods."""
    cls = _class_of_library(optimizer)
    decodes = cls is not None and cls.__name__ == "FusedAdam" and hasattr(optimizer, "set_scaled_state")
    return FusedAdamState(optimizer) if decodes else None


def placed(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter's state as a tensor that is placed like the parameter."""
    return placed_like(parameter, local) if isinstance(parameter, DTensor) else local
