"""What routers' auxiliary losses were: kept on the device until somebody asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


def auxiliary_loss_names(config: TransformerConfig) -> tuple[str, ...]:
    """The auxiliary losses of a model's routers, under the names that they have in Megatron-LM's log.

    Ranks: pure; the same also on pipeline stages without experts.
    """
    if config.num_moe_experts is None:
        return ()
    balancing = () if config.moe_aux_loss_coeff == 0.0 else (balancing_loss_name(config),)
    return balancing if config.moe_z_loss_coeff is None else (*balancing, "z_loss")


def balancing_loss_name(config: TransformerConfig) -> str:
    """The name of the loss that balances experts."""
    by_sequence = config.moe_router_load_balancing_type == "seq_aux_loss"
    return "seq_load_balancing_loss" if by_sequence else "load_balancing_loss"


class AuxiliaryLossRecord:
    """Sums of auxiliary losses, before their coefficients, over the routers and forwards of this rank since the last ``take``.

    Args:
        names: of the losses that are recorded.

    Ranks: each its own; nothing is communicated, and the host does not wait.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self._parts: dict[str, list[torch.Tensor]] = {name: [] for name in names}

    def add(self, name: str, part: torch.Tensor) -> None:
        """This rank's part [] of a router's loss in one forward counts, unless backward is repeating that forward."""
        if torch._C._current_graph_task_id() == -1:
            self._parts[name].append(part.detach())

    def clear(self) -> None:
        """The sums are zeros again; what a step that was given up has left is gone."""
        for parts in self._parts.values():
            parts.clear()

    def take(self, device: torch.device) -> torch.Tensor:
        """[names] the sums, in fp64 on ``device``; they are zeros again afterwards."""
        sums = [
            torch.stack(parts).double().sum() if parts else torch.zeros((), dtype=torch.float64, device=device)
            for parts in self._parts.values()
        ]
        self.clear()
        return torch.stack(sums)
