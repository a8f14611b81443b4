"""megatron-fsdp is imported as its users have it: without this repository's package of Megatron's name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import megatron.core
from benchmarks.engines.peers import import_megatron_fsdp, megatron_fsdp_is_missing

_STAND_IN = """
try:
    from megatron.core.distributed import DistributedDataParallelConfig
    FOUND = "ours"
except ImportError:
    FOUND = "none"
"""


def test_our_megatron_is_hidden_while_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks for Megatron-LM, and would take our classes for those that it knows."""
    package = tmp_path / "stand_in_fsdp"
    package.mkdir()
    (package / "__init__.py").write_text("from .inner import FOUND\n")
    (package / "inner.py").write_text(_STAND_IN)
    monkeypatch.syspath_prepend(tmp_path)
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "megatron"}
    try:
        assert import_megatron_fsdp("stand_in_fsdp").FOUND == "none"
        after = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "megatron"}
        assert after == before and sys.modules["megatron.core"] is megatron.core
    finally:
        for name in ("stand_in_fsdp", "stand_in_fsdp.inner"):
            sys.modules.pop(name, None)


def test_what_is_not_installed_is_an_import_error() -> None:
    with pytest.raises(ImportError):
        import_megatron_fsdp("a_package_that_nobody_has")
    assert sys.modules["megatron.core"] is megatron.core


def test_it_needs_devices() -> None:
    class Settings:
        device = torch.device("cpu")

    assert megatron_fsdp_is_missing(Settings()) == "needs CUDA devices"  # type: ignore[arg-type]
