"""What ``transformers`` knows of a sharded model: its classes and dtypes before ``fully_shard``, and how its files become its tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from megatron.core.distributed.fsdp.api.module import FsdpModule, class_before, fsdp_modules
from megatron.core.distributed.fsdp.checkpoint import StoredTensor
from megatron.core.distributed.fsdp.huggingface.traced_tensor import TracedTensor

_OLDEST = "5.20"  # version of transformers
# Buffers that files of older versions have, and that models compute.
_COMPUTED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"\.attn\.(masked_)?bias$")


def library() -> Any:
    """Return what is used of ``transformers``: ``mapping`` and ``loading``, its modules of these purposes.

    Raises:
        ImportError: it is not installed, or older than version 5, whose models say themselves how their files are read.
    """
    try:
        from transformers import conversion_mapping, core_model_loading
    except ImportError as error:
        raise ImportError(
            f"Hugging Face models need transformers {_OLDEST} or newer, got: {error}; pip install 'transformers>={_OLDEST}'"
        ) from error
    return SimpleNamespace(mapping=conversion_mapping, loading=core_model_loading)


def trainer_class() -> Any:
    """Return the ``Trainer`` of ``transformers``."""
    from transformers import Trainer

    return Trainer


def tokenizer_class() -> Any:
    """Return ``AutoTokenizer`` of ``transformers``.

    Raises:
        ImportError: it is not installed.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ImportError(
            f"a tokenizer's own chat template is applied by transformers, got: {error}; pip install transformers, or use another "
            "--sft-tokenizer-prompt-format than default"
        ) from error
    return AutoTokenizer


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


def model_of_files(
    model: nn.Module, stored: Mapping[str, StoredTensor], own: Mapping[str, torch.Tensor]
) -> dict[str, TracedTensor]:
    """Return what a model's tensors are made of, by name, and what fits no name of the model's under the name that it would have.

    Leaves ``model._weight_conversions`` as ``from_pretrained`` does, so that a later save writes the names of these files.

    Args:
        stored: tensors of the files.
        own: the model's tensors under all their names.

    Raises:
        ValueError: a conversion of the model's failed on these tensors.
    """
    hf = library().loading
    with own_classes(model):
        table = library().mapping.get_model_conversion_mapping(model)
    renamings = [entry for entry in table if isinstance(entry, hf.WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, hf.WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    collected: dict[str, Any] = {}
    found: dict[str, TracedTensor] = {}
    for name in sorted(stored, key=hf.dot_natural_key):
        tensor = TracedTensor.named(name, stored[name].size, stored[name].dtype)
        prefix = model.base_model_prefix
        target, pattern = hf.rename_source_key(name, renamings, converters, prefix, own)
        if target not in own and name in own:
            target, pattern = hf.rename_source_key(name, [], [], prefix, own)
        if target not in own or pattern is None:
            if target in found:
                raise ValueError(f"tensors of the files must have names of their own, got several for {target}")
            found[target] = tensor
            continue
        converter = collected.setdefault(target, deepcopy(by_pattern[pattern]))
        converter.add_tensor(target, name, pattern, tensor)
    for target, converter in collected.items():
        found |= _converted(model, target, converter)
    model._weight_conversions = [entry for entry in table if entry.was_used()]  # type: ignore[assignment]
    return found


def _converted(model: nn.Module, target: str, converter: Any) -> dict[str, TracedTensor]:
    sources = [tensor for tensors in converter.collected_tensors.values() for tensor in tensors]
    try:
        with torch.no_grad():
            made = converter.convert(target, model=model, config=model.config)
    except Exception as error:
        raise ValueError(
            f"{target} must be made of the tensors of the files as {converter} says, got {type(error).__name__}: {error} "
            f"with {sources[0].origin} of shape {list(sources[0].shape)}; the files are of another model or damaged"
        ) from error
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def files_of_model(model: nn.Module, own: Mapping[str, TracedTensor]) -> dict[str, TracedTensor]:
    """Return the tensors of a model's files, made of its own: the inverse of ``model_of_files``.

    Args:
        own: the model's tensors, each under one name.
    """
    with own_classes(model), torch.no_grad():
        return library().loading.revert_weight_conversion(model, dict(own))


def name_in_files(model: nn.Module, names: tuple[str, ...]) -> str:
    """Return the name of a tied tensor under which it is saved."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return next((name for name in names if name not in tied), names[0])


def is_ignored(model: nn.Module, name: str, *, missing: bool) -> bool:
    """Return whether the model says that files may lack this tensor, or have it in excess."""
    kind = "missing" if missing else "unexpected"
    own = list(getattr(model, f"_keys_to_ignore_on_load_{kind}", None) or ())
    return any(re.search(pattern, name) for pattern in [*own, *(() if missing else _COMPUTED)])
