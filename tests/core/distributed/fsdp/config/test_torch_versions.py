"""The engine patches DTensor, so it runs on the versions of torch that this was tried with, and says so elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.core.distributed.fsdp.config.torch_versions import ALLOW_UNTRIED, check_torch_version

REPOSITORY = Path(__file__).resolve().parents[5]


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1+cu130", "2.13.0a0+git1f2e3d4", "2.13.9", torch.__version__])
def test_versions_that_were_tried_are_admitted(version: str) -> None:
    check_torch_version(version)


@pytest.mark.parametrize("version", ["1.13.1", "2.10.2+cpu", "2.14.0", "2.14.0.dev20261101+cu130", "3.0.0"])
def test_other_versions_are_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALLOW_UNTRIED, raising=False)
    message = rf"torch must be a version from 2\.11 to 2\.13, .* got {re.escape(version)}; install .*{ALLOW_UNTRIED}=1"
    with pytest.raises(ImportError, match=message):
        check_torch_version(version)


def test_a_variable_turns_the_refusal_into_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOW_UNTRIED, "1")
    with pytest.warns(RuntimeWarning, match=r"torch must be .*got 2\.14\.0"):
        check_torch_version("2.14.0")
    monkeypatch.setenv(ALLOW_UNTRIED, "0")
    with pytest.raises(ImportError, match=r"got 2\.14\.0"):
        check_torch_version("2.14.0")


def test_importing_the_engine_asks_before_it_patches() -> None:
    """The engine's first import: nothing of DTensor is imported yet, let alone patched."""
    program = """
import sys, torch
torch.__version__ = "2.14.0"
try:
    import megatron.core.distributed.fsdp.layout.granule
except ImportError as error:
    own = [name for name in sys.modules if name.startswith("megatron.core.distributed.fsdp.")]
    print(error, own, "torch._dynamo" in sys.modules, sep="|")
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    message, own, imports_dynamo = done.stdout.strip().split("|")
    assert "got 2.14.0" in message and imports_dynamo == "False"
    assert own == "['megatron.core.distributed.fsdp.config']", "nothing else of the engine has been imported"


def test_installing_admits_the_same_versions() -> None:
    """Pip asks setup.py, which cannot import this."""
    (requirement,) = re.findall(r'"torch(>=[^"]*)"', (REPOSITORY / "setup.py").read_text(encoding="utf-8"))
    assert requirement == ">=2.11,<2.14"
