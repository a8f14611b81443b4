"""The module that does nothing, for places that a layer spec leaves empty."""

from __future__ import annotations

from typing import Any

import torch


class IdentityOp(torch.nn.Module):
    """A module that returns its first argument and accepts any constructor arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return x


class IdentityFuncOp(IdentityOp):
    """A module whose call returns a function that returns its first argument, for places where a spec names such a module."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward
