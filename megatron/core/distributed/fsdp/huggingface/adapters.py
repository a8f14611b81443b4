"""Models with adapters of ``peft``: LoRA next to the layers of a model of ``transformers``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron.core.distributed.fsdp.huggingface.conversion import own_classes

FILE = "adapter_model.safetensors"
_BASE_LAYER = ".base_layer."


def has_adapters(model: nn.Module) -> bool:
    """Return whether the module is a ``PeftModel``."""
    return hasattr(model, "peft_config") and callable(getattr(model, "get_base_model", None))


def check_adapters(model: nn.Module) -> None:
    """Refuse adapters that do more than add tensors to the model's.

    Raises:
        NotImplementedError: the adapter is no LoRA, or copies modules of the model.
    """
    for name, config in adapter_configs(model).items():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if kind != "LORA" or getattr(config, "modules_to_save", None):
            raise NotImplementedError(
                f"adapters of a model to load or save here must be LoRA without modules_to_save, got {kind} with "
                f"{getattr(config, 'modules_to_save', None)} in {name!r}; use save_checkpoint and load_checkpoint for it"
            )


def adapter_configs(model: nn.Module) -> dict[str, Any]:
    """Return the configurations of the model's adapters, by name; none of other models."""
    return dict(model.peft_config) if has_adapters(model) else {}  # type: ignore[arg-type]


def names_in_model(model: nn.Module, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names that a tensor has in the model without adapters; none of an adapter's own."""
    if not has_adapters(model):
        return names
    base = model.get_base_model()  # type: ignore[operator]
    prefix = next(name for name, module in model.named_modules() if module is base) + "."
    return tuple(name.removeprefix(prefix).replace(_BASE_LAYER, ".") for name in names if "lora_" not in name)


def is_inside_adapters(name: str) -> bool:
    """Return whether a name is of a layer that has adapters."""
    return _BASE_LAYER in name or ".lora_" in name


def meta_adapters(model: nn.Module) -> list[nn.Module]:
    """Return the layers whose adapters are on the meta device.

    Raises:
        NotImplementedError: their initial values are made of the model's weights, which are not there.
    """
    found = [
        module
        for module in model.modules()
        if callable(getattr(module, "reset_lora_parameters", None))
        and any(p.is_meta for name, p in module.named_parameters() if name.startswith("lora_"))
    ]
    for name, config in adapter_configs(model).items() if found else ():
        if config.init_lora_weights not in (True, "gaussian"):
            raise NotImplementedError(
                f"init_lora_weights of an adapter on the meta device must be True or 'gaussian', got {config.init_lora_weights!r} "
                f"of {name!r}, for which weights must be there; build the model on a real device"
            )
    return found


def initialize_adapters(model: nn.Module, layers: list[nn.Module]) -> None:
    """Give adapters of these layers the initial values of ``peft``. Ranks: all of the mesh, with equal seeds."""
    for layer in layers:
        for name, config in adapter_configs(model).items():
            if name in layer.r:  # type: ignore[operator]
                layer.reset_lora_parameters(name, config.init_lora_weights)  # type: ignore[operator]


def files_of_adapter(model: nn.Module, own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of the active adapter under the names of ``peft``'s files."""
    from peft import get_peft_model_state_dict

    with own_classes(model):
        found: dict[str, torch.Tensor] = get_peft_model_state_dict(
            model, state_dict=dict(own), adapter_name=_active(model), save_embedding_layers=False
        )
    return found


def write_config(model: nn.Module, path: Path) -> None:
    """Write ``adapter_config.json`` of the active adapter, for inference."""
    config = adapter_configs(model)[_active(model)]
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(model.get_base_model(), "name_or_path", None) or None  # type: ignore[operator]
    trains, config.inference_mode = config.inference_mode, True
    try:
        config.save_pretrained(path)
    finally:
        config.inference_mode = trains


def _active(model: nn.Module) -> str:
    active = model.active_adapter
    if not isinstance(active, str):
        raise ValueError(f"one adapter must be active to be saved, got {active}; call set_adapter(name) before")
    return active
