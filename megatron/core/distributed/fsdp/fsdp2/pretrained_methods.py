"""Methods of Hugging Face models that would save or replace sharded weights as if they were whole."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn

from torch import nn

_RESIZE, _SAVE = "resize_token_embeddings", "save_pretrained"


def guard_pretrained_methods(modules: Sequence[tuple[str, nn.Module]]) -> None:
    """Make the unit's modules refuse calls of these methods that would lose weights."""
    for _, module in modules:
        if callable(getattr(module, _SAVE, None)) and _SAVE not in module.__dict__:
            # Weak: the module's own __dict__ holds it.
            module.__dict__[_SAVE] = functools.partial(_save_given_state, weakref.ref(module))
        if callable(getattr(module, _RESIZE, None)):
            module.__dict__[_RESIZE] = functools.partial(_refuse_resizing, type(module).__name__)


def _refuse_resizing(model: str, *_: Any, **__: Any) -> NoReturn:
    """Stand in for ``resize_token_embeddings`` of a Hugging Face model.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        f"the embedding of the sharded {model} must keep its rows, got a call of {_RESIZE}, which would put weights in its place that no "
        "rank shards; call it before fully_shard, or save_pretrained the model, resize what from_pretrained reads, and shard that"
    )


def _save_given_state(ref: weakref.ref[nn.Module], *args: Any, **kwargs: Any) -> Any:
    """Stand in for ``save_pretrained``, which would write this rank's rows as if they were whole tensors: save a given ``state_dict``.

    Raises:
        NotImplementedError: none is given.
    """
    module: Any = ref()
    if kwargs.get("state_dict") is None:
        raise NotImplementedError(
            f"save_pretrained of the sharded {type(module).__name__} must be given whole weights as state_dict, got none; call "
            "megatron.core.distributed.fsdp.huggingface.save_pretrained(model, folder) on all ranks, or pass state_dict="
            "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)) on rank 0, which all "
            "ranks have made"
        )
    return type(module).save_pretrained(module, *args, **kwargs)
