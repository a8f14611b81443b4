"""The model's part of a checkpoint: each tensor once, under its names in the unwrapped model; and how two states differ."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from megatron.core.distributed.fsdp.api.module import FsdpModule, fsdp_modules
from megatron.core.distributed.fsdp.codec.scaled_weights import ScaledWeights
from megatron.core.distributed.fsdp.flat_optimizer.flat_norm import is_copy
from megatron.core.module_names import named_modules

OPTIMIZER, EXTRA_STATE, OPTIONAL_STATE = "optimizer.", "extra_state.", "optional_state."
PER_RANK = "per_rank"
OBJECT = "/shard_0_1"  # at the end of the names of plain values in Megatron-LM's torch_dist, whose readers expect it
_MODULE_STATE = "_extra_state"  # what nn.Module.state_dict calls the result of get_extra_state
Model = nn.Module | Sequence[nn.Module]
"""A model, or the pipeline stages of it that this rank has."""
_MAX_NAMED = 20
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


@dataclass(frozen=True)
class NamedTensor:
    """A tensor of the state.

    Args:
        names: its names in the model, several if it is tied; it is stored under the first.
        tensor: a DTensor, or a plain tensor that is equal on all ranks that have the name.
        is_copy: True if another pipeline stage holds it too and saves it.
    """

    names: tuple[str, ...]
    tensor: torch.Tensor
    is_copy: bool = False

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass
class Problems:
    """The differences between a checkpoint and what it is loaded into, by name: of the model or the optimizer. True if there are any.

    Args:
        missing: names that the checkpoint lacks.
        extra: names that only the checkpoint has.
        misshaped: names with both shapes.
        mistyped: names with both dtypes, or of plain values in place of tensors.
        other: sentences.
        is_partial: this rank holds a part of the model, so that another rank may have what is ``extra`` here.
    """

    part: str
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    misshaped: list[str] = field(default_factory=list)
    mistyped: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)
    is_partial: bool = False

    def __bool__(self) -> bool:
        return bool(self.missing or self._own_extra or self.misshaped or self.mistyped or self.other)

    @property
    def _own_extra(self) -> list[str]:
        return [] if self.is_partial else self.extra

    def __str__(self) -> str:
        kinds = (
            ("missing in the checkpoint", self.missing),
            (f"in the checkpoint, but not in the {self.part}", self._own_extra),
            ("of another shape", self.misshaped),
            ("of another kind", self.mistyped),
            ("also", self.other),
        )
        return f"{self.part}: " + "; ".join(f"{kind}: {_listed(names)}" for kind, names in kinds if names)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside of wrappers: modules that hold only one child, registered as ``module``.

    Raises:
        TypeError: ``model`` is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be an nn.Module, or a list of this rank's stages of one, got {type(model).__name__}; pass several "
            "models each by itself, with a path of its own"
        )
    while not isinstance(model, FsdpModule):
        children = list(model._modules.items())
        owns = any(own is not None for own in (*model._parameters.values(), *model._buffers.values()))
        if owns or len(children) != 1 or children[0][0] != "module" or children[0][1] is None:
            break
        model = children[0][1]
    return model


def roots_of(model: Model) -> list[nn.Module]:
    """Return the unwrapped models whose state is that of ``model``: several, where a rank has several pipeline stages.

    Raises:
        TypeError: ``model``, or one of a list, is no module.
    """
    chunks: Sequence[nn.Module]
    chunks = model if isinstance(model, list | tuple) else getattr(model, "model_chunks", None) or [model]
    return [unwrapped(chunk) for chunk in chunks]


def units_of(model: Model) -> list[FsdpModule]:
    """Return the sharded modules of a model, or of all its stages on this rank."""
    return [module for root in roots_of(model) for module in fsdp_modules(root)]


def _named_modules(model: Model, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of all stages under names in the whole model."""
    for root in roots_of(model):
        yield from named_modules(root, remove_duplicate=remove_duplicate)


def model_tensors(model: Model) -> list[NamedTensor]:
    """Return main weights, plain parameters and persistent buffers of a model, each once, in the order of its modules.

    Makes the current stream wait for updates of weights and optimizer state that still run.

    Raises:
        ValueError: a name is reserved for other state; a tensor is on the meta device.
    """
    units = units_of(model)
    for unit in units:
        if unit._fsdp_unit.context is not None:
            unit._fsdp_unit.context.finish_updates()
    main_weights = {
        id(unsharded): sharded
        for unit in units
        for group in unit._fsdp_groups
        for sharded, unsharded in zip(group.sharded, group.unsharded, strict=True)
    }
    found: dict[int, tuple[list[str], torch.Tensor]] = {}
    stored_names = _stored_names(model)
    for prefix, module in _named_modules(model, remove_duplicate=False):
        own: dict[str, torch.Tensor] = {
            key: main_weights.get(id(p), p) for key, p in module._parameters.items() if p is not None
        }
        own.update(
            (key, buffer)
            for key, buffer in module._buffers.items()
            if buffer is not None and key not in module._non_persistent_buffers_set
        )
        for key, tensor in own.items():
            name = _checked(f"{prefix}.{key}" if prefix else key, tensor)
            names = found.setdefault(id(tensor), ([], tensor))[0]
            names += [stored_names[name], name] if name in stored_names else [name]
    _check_apart(model, found.values())
    return [_named(names, tensor) for names, tensor in found.values()]


def _stored_names(model: Model) -> dict[str, str]:
    """Return the names in checkpoints of tensors, by name in the model, where the two differ.

    A module says so with ``names_in_checkpoint``, a mapping of names relative to it. So checkpoints do not depend on which
    of several implementations of the same layers the model has. What is read may also have the name in the model.
    """
    return {
        f"{prefix}.{own}".lstrip("."): f"{prefix}.{stored}".lstrip(".")
        for prefix, module in _named_modules(model)
        for own, stored in getattr(module, "names_in_checkpoint", {}).items()
    }


def _check_apart(model: Model, found: Iterable[tuple[list[str], torch.Tensor]]) -> None:
    """Check that the stages of a model have names of their own: two models in one list do not."""
    if len(roots_of(model)) == 1:
        return
    seen: set[str] = set()
    for names, _ in found:
        if same := seen.intersection(names):
            raise ValueError(
                f"the modules of a list must be pipeline stages of one model, got {sorted(same)[0]} in two of them; pass several "
                "models each by itself, with a path of its own"
            )
        seen.update(names)


def _named(names: list[str], tensor: torch.Tensor) -> NamedTensor:
    if is_copy(tensor):
        return NamedTensor((tensor.canonical_name,), tensor, is_copy=True)  # type: ignore[attr-defined]
    return NamedTensor(tuple(names), tensor)


def is_split(model: Model) -> bool:
    """Return whether ranks hold different parts of the model, under different names."""
    groups = (group for module in units_of(model) for group in module._fsdp_groups)
    return any(group.group_mesh.model.model_groups for group in groups)


def module_states(model: Model) -> dict[str, nn.Module]:
    """Return the modules that have a ``get_extra_state``, by the name of that state in ``state_dict``.

    A module with optional state says there what it keeps, not here.
    """
    return {
        f"{prefix}.{_MODULE_STATE}" if prefix else _MODULE_STATE: module
        for prefix, module in _named_modules(model)
        if type(module).get_extra_state is not nn.Module.get_extra_state
        and not (hasattr(module, "get_optional_state") or _scales(module))
    }


def optional_states(model: Model) -> dict[str, Any]:
    """Return the modules that have a ``get_optional_state``, by the name of that state in checkpoints.

    It is state that a model may do without: a module whose state is None saves none, a module whose state was not saved
    keeps what it has, and what no module here has is left unread. Modules of transformer-engine get one here.
    """
    states: dict[str, Any] = {
        f"{OPTIONAL_STATE}{prefix}": _optional_state(module)
        for prefix, module in _named_modules(model)
        if hasattr(module, "get_optional_state") or _scales(module)
    }
    scaled = {
        id(weights.sharded[i]): ScaleState(weights, i)
        for weights in scaled_weights(model)
        for i in range(len(weights.sharded))
    }
    if scaled:
        states |= {
            f"{OPTIONAL_STATE}{entry.name}": scaled[id(entry.tensor)]
            for entry in model_tensors(model)
            if id(entry.tensor) in scaled
        }
    return states


def _scales(module: nn.Module) -> bool:
    """Return whether a module is one of transformer-engine's, which may keep histories."""
    return hasattr(module, "fp8_meta")


def _optional_state(module: nn.Module) -> Any:
    if hasattr(module, "get_optional_state"):
        return module
    from megatron.core.extensions.transformer_engine_histories import Histories

    return Histories(module)


def former_module_states(model: Model) -> list[str]:
    """Return names under which checkpoints of before may have what is optional state now."""
    return [f"{prefix}.{_MODULE_STATE}" for prefix, module in _named_modules(model) if _scales(module)]


@dataclass(frozen=True)
class ScaleState:
    """The scales of a weight that rests in bytes, as optional state: where there are none, they begin with the weights."""

    weights: ScaledWeights
    index: int

    def get_optional_state(self) -> dict[str, torch.Tensor] | None:
        return self.weights.scale_state(self.index)

    def set_optional_state(self, state: dict[str, torch.Tensor] | None) -> None:
        self.weights.restore_scales(self.index, state)


def scaled_weights(model: Model) -> list[ScaledWeights]:
    """Return the weights of all groups that rest in bytes."""
    groups = (group for module in units_of(model) for group in module._fsdp_groups)
    return [group.weights for group in groups if isinstance(group.weights, ScaledWeights)]


def plain_copy(value: Any, name: str) -> Any:
    """Copy nested plain values and tensors; tensors to the CPU.

    Raises:
        TypeError: a value is not plain; gives its place in the nest.
    """
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, nn.Parameter):
            raise TypeError(
                f"{name} must hold plain tensors, got a {type(value).__name__}; take its to_local() or values"
            )
        return value.detach().to("cpu", copy=True).contiguous()
    if type(value) in _PLAIN:
        return value
    if type(value) in (list, tuple):
        return type(value)(plain_copy(item, f"{name}[{index}]") for index, item in enumerate(value))
    if type(value) in (dict, OrderedDict, defaultdict):
        return {
            plain_copy(key, f"a key of {name}"): plain_copy(item, f"{name}[{key!r}]") for key, item in value.items()
        }
    raise TypeError(
        f"{name} must be a tensor, None, a number, a string, bytes, or a list, tuple or dict of these, got a "
        f"{type(value).__module__}.{type(value).__name__}; convert it before saving"
    )


def _checked(name: str, tensor: torch.Tensor) -> str:
    if name.startswith((OPTIMIZER, EXTRA_STATE, OPTIONAL_STATE)):
        raise ValueError(
            f"{name} of the model has a name that checkpoints reserve for other state; no child of the model may be "
            "called optimizer, extra_state or optional_state"
        )
    if tensor.is_meta:
        raise ValueError(f"{name} must have values, got a tensor on the meta device; materialise the model first")
    return name


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMED])
    more = f", ... ({len(names)} in all)" if len(names) > _MAX_NAMED else f" ({len(names)})"
    return shown + more
