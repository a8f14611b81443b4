"""Facts about Megatron-LM in the folder ``shared`` beside the checkout; tests of what was generated from them skip without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "shared/data/megatron_cli"


def shared_facts(name: str) -> Any:
    """Read a JSON file of the folder."""
    path = FOLDER / name
    if not path.exists():
        pytest.skip(f"{path} is not there")
    return json.loads(path.read_text(encoding="utf-8"))
