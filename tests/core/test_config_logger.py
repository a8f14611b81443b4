"""What a component was built with, on disk."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.config_logger import has_config_logger_enabled, log_config_to_disk
from megatron.core.transformer.transformer_config import TransformerConfig


def _config(folder: str) -> TransformerConfig:
    fields: dict[str, Any] = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "config_logger_dir": folder}
    return TransformerConfig(**fields)


def test_a_component_writes_its_arguments(tmp_path: Path) -> None:
    config = _config(str(tmp_path / "new"))
    assert has_config_logger_enabled(config)

    class Layer(torch.nn.Module):
        def __init__(self, config: TransformerConfig, dtype: torch.dtype) -> None:
            super().__init__()
            log_config_to_disk(config, locals())

    Layer(config, torch.bfloat16)
    Layer(config, torch.float32)
    first, second = (json.loads((tmp_path / f"new/Layer.rank_0.iter{n}.json").read_text()) for n in (0, 1))
    assert first["config"]["hidden_size"] == 8 and "self" not in first
    assert (first["dtype"], second["dtype"]) == ("torch.bfloat16", "torch.float32")


def test_an_ordered_dict_of_tensors_is_saved_by_torch(tmp_path: Path) -> None:
    log_config_to_disk(_config(str(tmp_path)), OrderedDict(weight=torch.ones(2)), prefix="state", rank_str="3")
    assert torch.load(tmp_path / "state.rank_3.iter0.pth")["weight"].tolist() == [1.0, 1.0]


def test_without_a_folder_nothing_is_written() -> None:
    assert not has_config_logger_enabled(_config(""))
    with pytest.raises(ValueError, match="config_logger_dir"):
        log_config_to_disk(_config(""), {})
