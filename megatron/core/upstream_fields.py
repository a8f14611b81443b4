"""Fields of Megatron-Core's configurations: names, order and defaults, from ``upstream_fields.json``, which ``tools/upstream.py`` writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch


def _value(default: Any) -> object:
    if isinstance(default, str) and default.startswith("torch."):
        return getattr(torch, default.removeprefix("torch."))
    return tuple(default) if isinstance(default, list) else default


UPSTREAM_FIELDS: dict[str, dict[str, object]] = {
    config: {name: _value(default) for name, default in fields.items()}
    for config, fields in json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")).items()
}
"""By class; a function or a member of an enumeration is its name."""
