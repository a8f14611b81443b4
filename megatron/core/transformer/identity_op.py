"""Modules that stand where a layer spec has nothing to put."""

from __future__ import annotations

from typing import Any

import torch


class IdentityOp(torch.nn.Module):
    """Returns its first argument; takes any construction arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return x


class IdentityFuncOp(IdentityOp):
    """Called without arguments, returns a function that returns its first argument."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward
