"""What is inside of wrapped models: the model, its configuration, its attributes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def unwrap_model(model: Any, module_instances: tuple[type, ...] | None = None) -> Any:
    """Return the model inside its wrappers (data parallelism, ``Float16Module``); of a list, a list.

    Args:
        module_instances: the classes that are wrappers; None: this framework's.
    """
    if isinstance(model, list):
        return [unwrap_model(one, module_instances) for one in model]
    wrappers, module = module_instances or _wrappers(), model
    while isinstance(module, wrappers):
        module = getattr(module, "module")  # noqa: B009 (any class may be a wrapper)
    return module


def _wrappers() -> tuple[type, ...]:
    from megatron.core.distributed import DistributedDataParallel, FullyShardedDataParallel
    from megatron.core.transformer.module import Float16Module

    return DistributedDataParallel, FullyShardedDataParallel, Float16Module


def get_attr_wrapped_model(
    model: torch.nn.Module, attr: str, allow_none: bool = True, return_model_obj: bool = False
) -> Any:
    """Return the attribute of the outermost module, from the wrappers to the model, that has it.

    Args:
        allow_none: False: modules whose attribute is None do not have it.
        return_model_obj: return that module instead.

    Raises:
        RuntimeError: none has it, or ``model`` is a list.
    """
    if isinstance(model, list):
        raise RuntimeError("get_attr_wrapped_model must be given one model, got a list; call it for each chunk")
    module: Any = model
    while not hasattr(module, attr) or (not allow_none and getattr(module, attr) is None):
        if not hasattr(module, "module"):
            raise RuntimeError(
                f"a model or one of its wrappers must have the attribute {attr!r}, got {type(model).__name__} without"
            )
        module = module.module
    return module if return_model_obj else getattr(module, attr)


def get_model_config(model: torch.nn.Module) -> Any:
    """Return the configuration of a model, wrapped or not."""
    return get_attr_wrapped_model(model, "config", allow_none=False)


def get_model_type(model: torch.nn.Module) -> Any:
    """Return the ``ModelType`` of a model, wrapped or not."""
    return get_attr_wrapped_model(model, "model_type")


def get_model_xattn(model: torch.nn.Module) -> bool:
    """Return whether a model's decoder has cross-attention: never."""
    return False


def chunks_of(model: torch.nn.Module | Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return a model as the list of its chunks."""
    return [model] if isinstance(model, torch.nn.Module) else list(model)
