"""Init methods: what fills a parameter with its initial values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

InitMethod = Callable[[torch.Tensor], Any]


class NormalInit:
    """An init method that draws from normal(0, std); callable with the tensor alone, as Megatron-Core's are."""

    def __init__(self, std: float) -> None:
        self.std = std

    def __call__(self, tensor: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        with torch.no_grad():
            return tensor.normal_(0.0, self.std, generator=generator)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(std={self.std})"


class ConfigInit(NormalInit):
    """A default derived from ``init_method_std``; ``dataclasses.replace`` on the config derives it again."""


class InheritedInit:
    """A default copied from another field's init method; ``dataclasses.replace`` on the config copies it again."""

    def __init__(self, init_method: InitMethod) -> None:
        self.init_method = init_method

    def __call__(self, tensor: torch.Tensor) -> Any:
        return self.init_method(tensor)


class ConstantInit:
    """An init method that fills a tensor with one value: ones for norms, zeros for biases."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return tensor.fill_(self.value)


class UniformInit:
    """An init method that draws from uniform(low, high).

    Args:
        logarithm: fill the tensor with the logarithms of what is drawn.
    """

    def __init__(self, low: float, high: float, *, logarithm: bool = False) -> None:
        self.low, self.high, self.logarithm = low, high, logarithm

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            drawn = tensor.uniform_(self.low, self.high)
            return drawn.log_() if self.logarithm else drawn

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.low}, {self.high}, logarithm={self.logarithm})"


class StepInit:
    """An init method of Mamba's biases of time steps: softplus of them is exp(uniform(log(low), log(high))).

    Source: mamba-ssm's initial values, with its smallest step of 1e-4.
    """

    def __init__(self, low: float = 1e-3, high: float = 0.1) -> None:
        self.low, self.high = low, high

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            steps = tensor.uniform_(math.log(self.low), math.log(self.high)).exp_().clamp_(min=1e-4)
            return steps.add_(torch.log(-torch.expm1(-steps)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.low}, {self.high})"
