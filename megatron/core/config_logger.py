"""Writing to disk what a component was built with, where ``config.config_logger_dir`` names a folder."""

from __future__ import annotations

import dataclasses
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from megatron.core import parallel_state
from megatron.core._rank_utils import safe_get_rank

__all__ = ["get_config_logger_path", "has_config_logger_enabled", "log_config_to_disk"]


def get_config_logger_path(config: Any) -> str:
    """Return the folder, "" for none."""
    return getattr(config, "config_logger_dir", "") or ""


def has_config_logger_enabled(config: Any) -> bool:
    """Return whether a folder is named."""
    return get_config_logger_path(config) != ""


def log_config_to_disk(config: Any, dict_data: dict[str, Any], prefix: str = "", rank_str: str = "") -> None:
    """Write a dict to ``PREFIX.rank_RANK.iterN`` in the folder, as JSON; an OrderedDict by ``torch.save``.

    N counts the files of this prefix and rank that exist. What JSON has no type for is written as text.

    Args:
        dict_data: for example ``locals()``; an entry "self" is left out.
        prefix: "" takes the class's name of the entry "self".
        rank_str: "" takes the indices of ``parallel_state.get_all_ranks``, or the rank where there are no groups.

    Raises:
        ValueError: the configuration names no folder.
    """
    folder = Path(get_config_logger_path(config))
    if not has_config_logger_enabled(config):
        raise ValueError("config_logger_dir must name a folder to write to, got none; see has_config_logger_enabled")
    folder.mkdir(parents=True, exist_ok=True)
    own = dict_data.get("self")
    name = prefix or ("" if own is None else type(own).__name__)
    rank = rank_str or _indices()
    stem = f"{name}.rank_{rank}.iter"
    path = folder / f"{stem}{len(list(folder.glob(f'{stem}*')))}"
    data = {key: value for key, value in dict_data.items() if key != "self"}
    if isinstance(dict_data, OrderedDict):
        torch.save(OrderedDict(data), f"{path}.pth")
    else:
        Path(f"{path}.json").write_text(json.dumps(data, default=_plain, skipkeys=True))


def _indices() -> str:
    if parallel_state.model_parallel_is_initialized():
        return parallel_state.get_all_ranks()
    return str(safe_get_rank())


def _plain(value: Any) -> Any:
    if isinstance(value, torch.nn.Module) and value._modules:
        return dict(value._modules)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return str(value)
