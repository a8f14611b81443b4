"""What modules and parameters were before ``fully_shard``, for code that asks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from megatron.core.distributed.fsdp.api.module import FsdpModule, class_before, fsdp_modules


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module, of a sharded one that from before ``fully_shard``."""
    return class_before(type(module)) if isinstance(module, FsdpModule) else type(module)


@contextmanager
def own_classes(model: nn.Module) -> Iterator[None]:
    """Give modules the classes that they had before ``fully_shard``, in this scope, in which no forward may run."""
    sharded = [(module, type(module)) for module in fsdp_modules(model)]
    for module, _ in sharded:
        module.__class__ = own_class(module)  # type: ignore[assignment]
    try:
        yield
    finally:
        for module, kind in sharded:
            module.__class__ = kind


def own_dtypes(model: nn.Module) -> dict[int, torch.dtype]:
    """Return the dtype that each sharded parameter had before ``fully_shard``, by its id.

    Under a policy with ``param_dtype`` it is that of the main weights, which FSDP2's policies leave as it was; elsewhere
    modules compute in it.
    """
    found: dict[int, torch.dtype] = {}
    for module in fsdp_modules(model):
        by_policy = module._fsdp_unit.origin.policy.param_dtype is not None
        for group in module._fsdp_groups:
            dtype = group.dtypes.main_params if by_policy else group.dtypes.compute
            found |= {id(sharded): dtype for sharded in group.sharded}
    return found
