"""Casts of a unit's inputs and outputs to the dtypes of its mixed-precision policy."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from megatron.core.distributed.fsdp.config.mixed_precision import MixedPrecisionPolicy


def cast_inputs_and_outputs(module: nn.Module, policy: MixedPrecisionPolicy) -> None:
    """Give the module's inputs and outputs the policy's dtypes, where it names some."""
    inputs, outputs = policy.param_dtype, policy.output_dtype
    if inputs is not None and policy.cast_forward_inputs:
        module.register_forward_pre_hook(
            lambda _, args, kwargs: cast_tensors((args, kwargs), inputs), with_kwargs=True, prepend=True
        )
    if outputs is not None:
        module.register_forward_hook(lambda _, args, output: cast_tensors(output, outputs))


def cast_tensors(value: Any, dtype: torch.dtype) -> Any:
    """Return a value with the floating-point tensors in its containers in ``dtype``; a value with nothing to cast is returned itself.

    Containers are those that FSDP2 looks into: dicts, lists, tuples, sets, their subclasses, and dataclasses. What is cast
    is a copy, of the same class where one can be made. Other objects, and packed sequences, are returned unchanged.
    """
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _cast_fields(value, dtype)
    if isinstance(value, dict):
        return _cast_entries(value, dtype)
    if isinstance(value, list | tuple | set) and not isinstance(value, PackedSequence):
        return _cast_items(value, dtype)
    return value


def _cast_fields(value: Any, dtype: torch.dtype) -> Any:
    fields = [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    changes = _changes(fields, dtype)
    if not changes:
        return value
    # dataclasses.replace would run __post_init__ once more, and not take fields with init=False.
    made = copy.copy(value)
    write = object.__setattr__ if type(value).__dataclass_params__.frozen else setattr
    for name, cast in changes:
        write(made, name, cast)
    return made


def _cast_entries(value: dict[Any, Any], dtype: torch.dtype) -> dict[Any, Any]:
    changes = _changes(value.items(), dtype)
    if not changes:
        return value
    if type(value) is dict:
        return value | dict(changes)
    try:
        made = copy.copy(value)
    except (TypeError, AttributeError):  # a class that cannot be copied
        made = dict(value)
    for key, cast in changes:
        made[key] = cast
    return made


def _cast_items(value: Any, dtype: torch.dtype) -> Any:
    items = list(value)
    cast = [cast_tensors(item, dtype) for item in items]
    if all(map(is_, items, cast)):
        return value
    if isinstance(value, list) and type(value) is not list:
        made = copy.copy(value)
        made[:] = cast
        return made
    return type(value)(*cast) if hasattr(value, "_fields") else type(value)(cast)


def _changes(entries: Iterable[tuple[Any, Any]], dtype: torch.dtype) -> list[tuple[Any, Any]]:
    cast = ((key, item, cast_tensors(item, dtype)) for key, item in entries)
    return [(key, made) for key, item, made in cast if made is not item]
