"""``fully_shard_pretrained``: the units of a Hugging Face model, found by what the model says of itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from torch import nn

from megatron.core.distributed.fsdp.fsdp2.forward_methods import register_fsdp_forward_method
from megatron.core.distributed.fsdp.fsdp2.fully_shard import fully_shard
from megatron.core.distributed.fsdp.fsdp2.methods import SHARDED
from megatron.core.distributed.fsdp.huggingface.adapters import has_adapters, initialize_adapters, meta_adapters
from megatron.core.distributed.fsdp.huggingface.conversion import own_class
from megatron.core.distributed.fsdp.huggingface.load import check_model
from megatron.core.distributed.fsdp.huggingface.load import initialize as initialize_weights

ModelT = TypeVar("ModelT", bound=nn.Module)


def fully_shard_pretrained(
    model: ModelT,
    *args: Any,
    units: Sequence[str | type[nn.Module]] | None = None,
    initialize: bool = True,
    **kwargs: Any,
) -> ModelT:
    """Shard a model of ``transformers``: its layers, its input embedding where it is not tied, then the model.

    A model with LoRA of ``peft`` is sharded as a whole: pass the ``PeftModel``. Its adapters get their initial values from ``peft``.

    Tied weights stay tied, and rest and travel once. A model on the meta device never lies on a rank as a whole: each unit gets
    memory, is sharded, and lets go of it before the next one.

    Args:
        model: a ``PreTrainedModel``, changed in place; on the meta device, or with values, which are those of the first rank.
        args: as for ``fully_shard``: mesh, placements, and so on.
        units: classes (or names of them) whose modules become units. None: the model's ``_no_split_modules``, the classes of its
            layers, or those that it has lists of.
        initialize: give a model on the meta device its own initial values (``_init_weights``). With equal seeds on all ranks
            they are those of ``model.initialize_weights()`` of the unsharded model. False leaves them to ``load_pretrained``.
        kwargs: as for ``fully_shard``, but for ``init_fn``.

    Returns:
        ``model``.

    Raises:
        TypeError: the model is not of ``transformers``.
        ValueError: it has no module of these classes; ``init_fn`` is given.

    Otherwise as ``fully_shard``.

    Ranks: all of the mesh.
    Source: ours.
    """
    check_model(model)
    if "init_fn" in kwargs:
        raise ValueError(
            "init_fn is the model's own _init_weights here; leave it out, or call fully_shard on layers and model"
        )
    is_meta = any(parameter.is_meta for parameter in model.parameters())
    for module in model.modules():
        module._is_fsdp_managed_module = SHARDED  # type: ignore[assignment]
    adapters = meta_adapters(model)
    found = units_of(model, units)
    for module in found:
        fully_shard(module, *args, init_fn=_fill_later, **kwargs)
    fully_shard(model, *args, init_fn=_fill_later, **kwargs)
    initialize_adapters(model, adapters)
    if is_meta and initialize:
        initialize_weights(model)
    if has_adapters(model):
        register_fsdp_forward_method(model, "generate")  # it calls the model inside, around which nothing is unsharded
    return model


def units_of(model: nn.Module, units: Sequence[str | type[nn.Module]] | None = None) -> list[nn.Module]:
    """Return the modules of a model that become units, inner ones before those around them, without the model itself.

    Raises:
        ValueError: there is none of the classes.
    """
    named = units if units is not None else getattr(model, "_no_split_modules", None) or _classes_of_layers(model)
    classes = {name if isinstance(name, str) else name.__name__ for name in named}
    found = [module for module in model.modules() if own_class(module).__name__ in classes and module is not model]
    if not found:
        raise ValueError(
            f"{type(model).__name__} must have modules of the classes {sorted(classes)} that become units, got none; pass "
            "units=[...], the classes of its layers"
        )
    if units is None:
        inside = {part for module in found for part in module.modules()}
        found += [module for module in _untied_input_embedding(model) if module not in inside]
    return found[::-1]


def _classes_of_layers(model: nn.Module) -> list[type[nn.Module]]:
    """Return the classes of which a model has lists, the layers of one that does not name them; of lists in lists the outer ones."""
    found: list[type[nn.Module]] = []
    for module in model.modules():
        kinds = {own_class(child) for child in module.children()} - {nn.ModuleList, nn.ModuleDict}
        is_list = isinstance(module, nn.ModuleList) and len(module) > 1 and len(kinds) == 1
        if is_list and not any(own_class(outer) in found and module in outer.modules() for outer in model.modules()):
            found += kinds
    return found


def _untied_input_embedding(model: nn.Module) -> list[nn.Module]:
    """Return the input embedding, if it shares no weight with other modules.

    The output layer is the model's own: losses that never make all logits (Liger, trl) read its weight in the model's forward.
    """
    try:
        module: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return []
    if not isinstance(module, nn.Embedding) or module is model:
        return []
    owners: dict[int, int] = {}
    for owner in model.modules():
        for parameter in owner._parameters.values():
            if parameter is not None:
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    return [module] if all(owners[id(p)] == 1 for p in module.parameters()) else []


def _fill_later(module: nn.Module) -> None:
    """Leave a module as it is: the whole model is filled once it is sharded."""
