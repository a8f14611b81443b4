"""Loss scales: what losses are multiplied by before backward, so that small gradients do not vanish in fp16."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class MegatronGradScaler(ABC):
    """A loss scale on the device. What it is in a step does not change before the step's ``update``.

    Args:
        initial_scale: the scale of the first step.
        device: where the scale is; None: the current CUDA device, or the CPU where there is none.

    Raises:
        ValueError: the scale is not positive.
    """

    def __init__(self, initial_scale: float, *, device: torch.device | None = None) -> None:
        _check_positive(initial_scale=initial_scale)
        if device is None:
            device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
        self._scale = torch.tensor([initial_scale], dtype=torch.float32, device=device)

    @property
    def scale(self) -> Tensor:
        """The scale [1] fp32, always the same tensor."""
        return self._scale

    @property
    def inv_scale(self) -> Tensor:
        """What undoes the scale, [1] fp32; a new tensor."""
        return self._scale.double().reciprocal().float()

    @abstractmethod
    def update(self, found_inf: bool | Tensor) -> None:
        """End a step in which ``found_inf`` says whether a gradient was not finite. Does not block the host."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state. Blocks the host."""

    @abstractmethod
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned; its scale may be a tensor, as in Megatron-Core."""


class ConstantGradScaler(MegatronGradScaler):
    """A loss scale that never changes."""

    def update(self, found_inf: bool | Tensor) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        pass


class DynamicGradScaler(MegatronGradScaler):
    """A loss scale that shrinks where gradients overflow, and grows where they have not for a while.

    All of its state is on the device, so that neither the decision nor the new scale makes the host wait, and a captured
    step can be replayed.

    Args:
        min_scale: the scale never shrinks below it.
        growth_factor: above 1; multiplies the scale after ``growth_interval`` steps in a row without overflow.
        backoff_factor: between 0 and 1; multiplies the scale after an overflow, once the hysteresis is used up.
        growth_interval: steps.
        hysteresis: overflows since the scale last grew from which on it shrinks, by each of them.

    Raises:
        ValueError: a value is out of range.

    Source: arXiv:1710.03740 section 3.2; names and rules are Megatron-Core's.
    """

    def __init__(
        self,
        initial_scale: float,
        min_scale: float,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        hysteresis: int,
        *,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(initial_scale, device=device)
        _check_positive(min_scale=min_scale, growth_interval=growth_interval, hysteresis=hysteresis)
        if min_scale > initial_scale:
            raise ValueError(f"min_scale must be at most initial_scale, got {min_scale} and {initial_scale}")
        if growth_factor <= 1.0 or not 0.0 < backoff_factor < 1.0:
            raise ValueError(
                "growth_factor must be above 1 and backoff_factor between 0 and 1, got "
                f"{growth_factor} and {backoff_factor}"
            )
        self.min_scale, self.growth_factor, self.backoff_factor = min_scale, growth_factor, backoff_factor
        self.growth_interval, self.hysteresis = growth_interval, hysteresis
        self._growth_tracker = torch.zeros(1, dtype=torch.int32, device=self._scale.device)
        self._hysteresis_tracker = torch.full_like(self._growth_tracker, hysteresis)

    @torch.no_grad()
    def update(self, found_inf: bool | Tensor) -> None:
        found = (
            found_inf.reshape(1) > 0 if isinstance(found_inf, Tensor) else torch.full_like(self._scale, found_inf) > 0
        )
        overflows_left = self._hysteresis_tracker - found.int()
        steps = torch.where(found, 0, self._growth_tracker + 1)
        grows = steps == self.growth_interval
        smaller = (self._scale * self.backoff_factor).clamp_(min=self.min_scale)
        kept = torch.where(found & (overflows_left <= 0), smaller, self._scale)
        self._scale.copy_(torch.where(grows, self._scale * self.growth_factor, kept))
        self._growth_tracker.copy_(torch.where(grows, 0, steps))
        self._hysteresis_tracker.copy_(torch.where(grows, self.hysteresis, overflows_left))

    def state_dict(self) -> dict[str, Any]:
        return {
            "scale": float(self._scale),
            "growth_tracker": int(self._growth_tracker),
            "hysteresis_tracker": int(self._hysteresis_tracker),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._scale.fill_(float(state_dict["scale"]))
        self._growth_tracker.fill_(state_dict["growth_tracker"])
        self._hysteresis_tracker.fill_(state_dict["hysteresis_tracker"])


def check_scale_state(state_dict: object) -> None:
    """Check a state that was read from a file.

    Raises:
        ValueError: it is neither empty nor the state of a ``DynamicGradScaler``.
    """
    kinds = {"scale": (float, Tensor), "growth_tracker": (int,), "hysteresis_tracker": (int,)}
    if isinstance(state_dict, dict) and (
        not state_dict or all(isinstance(state_dict.get(name), kind) for name, kind in kinds.items())
    ):
        return
    raise ValueError(f"the state of a loss scale must hold {list(kinds)}, got {state_dict!r}")


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if value <= 0:
            raise ValueError(f"{name} must be positive, got {value}")
