"""The module that stands where a layer spec has nothing to put."""

from __future__ import annotations

from typing import Any

import torch


class IdentityOp(torch.nn.Module):
    """Returns its first argument; takes any construction arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return x
