"""Counts writes of list operations (``torch._foreach_mul_``, ``_fused_adamw_``) to DTensors, as of all others.

A tensor's version counter tells of in-place operations. Those on lists do not count where the list holds DTensors: autograd
leaves the counting to the kernel, which sees the local tensors, and counts on some devices only.
Delete this file when ``torch._foreach_mul_([dtensor], 2)`` raises ``dtensor._version`` on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp.dtensor.layers_at_rest import by_torch

_PREFIXES = ("aten::_foreach_", "aten::_fused_")


def list_writes() -> Iterator[Any]:
    """Yield the operations that write to the list of tensors that is their first argument."""
    for full_name in torch._C._dispatch_get_all_op_names():
        if not full_name.startswith(_PREFIXES):
            continue
        name, _, overload = full_name.removeprefix("aten::").partition(".")
        operation = getattr(getattr(torch.ops.aten, name), overload or "default")
        first = operation._schema.arguments[0]
        if isinstance(first.type, torch.ListType) and first.alias_info is not None and first.alias_info.is_write:
            yield operation


def _patch_dtensor() -> None:
    handlers: dict[Any, Callable[..., Any]] = DTensor._op_dispatcher._custom_op_handlers

    def run_and_count(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = by_torch(operation, args, kwargs)
        torch.autograd.graph.increment_version(args[0])
        return result

    handlers.update(dict.fromkeys(list_writes(), run_and_count))


_patch_dtensor()
