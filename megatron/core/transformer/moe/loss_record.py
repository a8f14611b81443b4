"""Record of the routers' auxiliary losses for the log; values stay on the device until they are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron.core.transformer.moe.auxiliary_losses import RunningCounts, balancing_losses
from megatron.core.transformer.recomputation import repeats_a_forward

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


def auxiliary_loss_names(config: TransformerConfig) -> tuple[str, ...]:
    """List the losses that a model's modules add to the main one, by their names in Megatron-LM's log.

    Ranks: pure; the same also on pipeline stages without such modules.
    """
    names: tuple[str, ...] = ()
    if config.num_moe_experts is not None:
        names += tuple(map(balancing_loss_name, balancing_losses(config)))
        names += () if config.moe_z_loss_coeff is None else ("z_loss",)
    return names + tuple(mtp_loss_name(number) for number in range(1, 1 + (config.mtp_num_layers or 0)))


def mtp_loss_name(number: int) -> str:
    """Return the log's name of the loss of a layer of multi-token prediction, from 1."""
    return f"mtp_{number} loss"


def balancing_loss_name(kind: str) -> str:
    """Return the log's name of a load-balancing loss."""
    return f"{kind.removesuffix('aux_loss')}load_balancing_loss"


class AuxiliaryLossRecord:
    """Sums of auxiliary losses, without coefficients, over this rank's routers and forwards since the last ``take``.

    Args:
        names: the losses to record.

    Ranks: each alone, no communication; the host does not wait.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self._parts: dict[str, list[torch.Tensor]] = {name: [] for name in names}
        self.running_counts: list[RunningCounts] = []

    def add(self, name: str, part: torch.Tensor) -> None:
        """Add this rank's part [] of a router's loss, without gradient, unless it is not among ``names`` or backward is recomputing that forward."""
        if name in self._parts and not repeats_a_forward():
            self._parts[name].append(part)

    def clear(self) -> None:
        """Reset all sums to zero, also those of an interrupted step."""
        for parts in self._parts.values():
            parts.clear()
        for counts in self.running_counts:
            counts.clear()

    def take(self, device: torch.device) -> torch.Tensor:
        """Return the sums [number of names], in fp64 on ``device``, and reset them to zero."""
        sums = [
            torch.stack(parts).double().sum() if parts else torch.zeros((), dtype=torch.float64, device=device)
            for parts in self._parts.values()
        ]
        self.clear()
        return torch.stack(sums)
