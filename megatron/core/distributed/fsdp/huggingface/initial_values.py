"""A Hugging Face model's own initial values, given to parameters that are sharded already."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp.api.module import fsdp_modules
from megatron.core.distributed.fsdp.buffers.materialize import mark_unfilled
from megatron.core.distributed.fsdp.dtensor.placements import local_rows, write_part
from megatron.core.distributed.fsdp.huggingface.adapters import has_adapters, names_in_model
from megatron.core.distributed.fsdp.huggingface.before_sharding import own_classes, own_dtypes

_FILLED = "_is_hf_initialized"  # by this attribute transformers leaves tensors and modules alone


@torch.no_grad()
def initialize(model: nn.Module, loaded: Iterable[torch.Tensor] = ()) -> None:
    """Let the model fill its parameters and buffers by its ``_init_weights``, all but those that are loaded.

    A module's own parameters are whole, and in the dtype from before ``fully_shard``, while the model fills them; then each
    rank keeps its part. So with equal seeds on all ranks the values are those of ``initialize_weights()`` of the unsharded
    model. What it leaves out is named by the first forward.

    Args:
        loaded: tensors that stay as they are, now and in later calls; so do adapters.

    Ranks: all of the mesh.
    """
    adapters = [p for name, p in model.named_parameters() if has_adapters(model) and not names_in_model(model, (name,))]
    for tensor in (*loaded, *adapters):
        setattr(tensor, _FILLED, True)
    for module in model.modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if not all(getattr(tensor, _FILLED, False) for tensor in own):
            setattr(module, _FILLED, False)
    dtypes = own_dtypes(model)
    parts = [part for part in model.modules() if callable(getattr(part, "_init_weights", None))]
    with own_classes(model):
        for part in parts:
            own_fill: Any = part._init_weights
            part.__dict__["_init_weights"] = partial(_fill_whole, own_fill, dtypes)
        try:
            model.initialize_weights()  # type: ignore[operator]
        finally:
            for part in parts:
                del part.__dict__["_init_weights"]
    for unit in fsdp_modules(model):
        for group in unit._fsdp_groups:
            group.weights.note_load()
        if unit._fsdp_unit.context is not None:
            unit._fsdp_unit.context.weights_changed()


def _fill_whole(fill: Callable[[nn.Module], Any], dtypes: Mapping[int, torch.dtype], module: nn.Module) -> None:
    """Call ``fill`` on the module while its own sharded parameters, but for loaded ones, are whole; then keep this rank's part."""
    held = {key: p for key, p in module._parameters.items() if id(p) in dtypes and not getattr(p, _FILLED, False)}
    wholes: dict[str, nn.Parameter] = {}
    for key, sharded in held.items():
        assert isinstance(sharded, DTensor), "modules hold sharded parameters between passes"
        device = sharded._local_tensor.device
        whole = mark_unfilled(torch.empty(sharded.shape, dtype=dtypes[id(sharded)], device=device))
        wholes[key] = nn.Parameter(whole, requires_grad=False)
    module._parameters.update(wholes)
    try:
        fill(module)
    finally:
        module._parameters.update(held)
    for key, sharded in held.items():
        write_part(sharded, local_rows(sharded, wholes[key]))  # type: ignore[arg-type]
