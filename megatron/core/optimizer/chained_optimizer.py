"""Several optimizers that step as one: gradients are clipped by the norm over all of them."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm, count_zeros, get_grad_norm
from megatron.core.optimizer.optimizer import MegatronOptimizer, StepResult


class ProxyDict(MutableMapping[tuple[int, Any], Any]):
    """The states of several optimizers as one mapping, whose keys are (index of the optimizer, its key)."""

    def __init__(self, inner_dicts: Sequence[dict[Any, Any]]) -> None:
        self._inner = inner_dicts

    def __getitem__(self, key: tuple[int, Any]) -> Any:
        return self._inner[key[0]][key[1]]

    def __setitem__(self, key: tuple[int, Any], value: Any) -> None:
        self._inner[key[0]][key[1]] = value

    def __delitem__(self, key: tuple[int, Any]) -> None:
        del self._inner[key[0]][key[1]]

    def __len__(self) -> int:
        return sum(map(len, self._inner))

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return ((index, key) for index, inner in enumerate(self._inner) for key in inner)


class ChainedOptimizer(MegatronOptimizer):
    """Optimizers of different parameters that step together.

    A step clips all gradients by their common norm, and is skipped by all where a gradient of one is not finite.
    ``get_megatron_optimizer`` returns one optimizer, which needs no chain; ``chained_optimizers`` of it is itself.

    Args:
        chained_optimizers: all with equal ``config``; of torch's own, which have none, a chain only shows groups and states.

    Raises:
        ValueError: there is none, or their configurations differ.

    Ranks: steps, norms and counts are as for ``MegatronOptimizer``; all ranks must chain the same number.
    """

    def __init__(self, chained_optimizers: Sequence[MegatronOptimizer]) -> None:
        configs = [getattr(one, "config", None) for one in chained_optimizers]
        if not configs or any(config != configs[0] for config in configs):
            raise ValueError(
                f"ChainedOptimizer must be given optimizers of equal configurations, got {len(configs)} with others or none"
            )
        self.config = configs[0]  # type: ignore[assignment]
        self._chained = list(chained_optimizers)

    @property
    def chained_optimizers(self) -> list[MegatronOptimizer]:
        return self._chained

    @property
    def optimizer(self) -> torch.optim.Optimizer:  # type: ignore[override]
        """The optimizer of torch, where there is one.

        Raises:
            AttributeError: there are several.
        """
        if len(self.chained_optimizers) > 1:
            raise AttributeError  # MegatronOptimizer.__getattr__ says why
        return self.chained_optimizers[0].optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all; a list of its own."""
        return [group for one in self.chained_optimizers for group in one.param_groups]

    @property
    def state(self) -> Any:
        """The states of all, by (index of the optimizer, parameter)."""
        return ProxyDict([one.state for one in self.chained_optimizers])

    def get_loss_scale(self) -> Tensor:
        return self.chained_optimizers[0].get_loss_scale()

    def scale_loss(self, loss: Tensor) -> Tensor:
        return self.chained_optimizers[0].scale_loss(loss)

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        return any([one.prepare_grads() for one in self.chained_optimizers])

    @torch.no_grad()
    def step(self) -> StepResult:
        if self.prepare_grads():
            return StepResult(False, None, None)
        params = self.get_parameters()
        grad_norm = get_grad_norm(params)
        if self.config.clip_grad > 0:
            clip_grad_by_total_norm(params, self.config.clip_grad, grad_norm)
        num_zeros = count_zeros(params) if self.config.log_num_zeros_in_grad else None
        return StepResult(self.step_with_ready_grads(), grad_norm, num_zeros)

    def step_with_ready_grads(self) -> bool:
        return all([one.step_with_ready_grads() for one in self.chained_optimizers])

    def synchronize(self) -> None:
        for one in self.chained_optimizers:
            one.synchronize()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self.chained_optimizers:
            one.zero_grad(set_to_none)

    def state_dict(self) -> Any:
        """Return the state of each, in a list; of a single one its own."""
        states = [one.state_dict() for one in self.chained_optimizers]
        return states if len(states) > 1 else states[0]

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        """Return the states for ``dist_checkpointing``, by index; of a single one its own. Arguments as of each."""
        states = [one.sharded_state_dict(*args, **kwargs) for one in self.chained_optimizers]
        return dict(enumerate(states)) if len(states) > 1 else states[0]

    def load_state_dict(self, state_dict: Any) -> None:
        """Load what ``state_dict`` returned, or a mapping by index.

        Raises:
            ValueError: the states are of another number of optimizers.
        """
        if len(self.chained_optimizers) == 1:
            self.chained_optimizers[0].load_state_dict(state_dict)
            return
        states = [state_dict[key] for key in sorted(state_dict)] if isinstance(state_dict, dict) else list(state_dict)
        if len(states) != len(self.chained_optimizers):
            raise ValueError(
                f"the state must have an entry for each of the {len(self.chained_optimizers)} optimizers, got {len(states)}"
            )
        for one, state in zip(self.chained_optimizers, states, strict=True):
            one.load_state_dict(state)
