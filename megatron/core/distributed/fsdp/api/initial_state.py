"""State of optimizers before their first step, for loads that fill only what is there."""

from __future__ import annotations

from typing import Any

import torch


def make_initial_state(optimizer: torch.optim.Optimizer) -> bool:
    """Give parameters without state the state that they have before the first step: zeros, and no steps.

    ``torch.distributed.checkpoint`` and Megatron-Core's ``dist_checkpointing`` fill the tensors of a state dict, and torch's
    optimizers make theirs in the first step alone.

    Returns:
        Whether the state of such an optimizer is known: of torch's Adam and AdamW, and of SGD without dampening.

    Ranks: local.
    """
    kind = type(optimizer)
    if kind not in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        return False
    if kind is torch.optim.SGD and any(group["dampening"] for group in optimizer.param_groups):
        return False  # the first step takes the gradient as it is
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and not optimizer.state.get(parameter):
                state = _of_sgd(parameter, group) if kind is torch.optim.SGD else _of_adam(parameter, group)
                if state:
                    optimizer.state[parameter] = state
    return True


@torch.no_grad()
def _of_adam(parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.Tensor]:
    on_device = bool(group.get("capturable") or group.get("fused"))
    step = torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")
    keys = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))
    return {"step": step, **{key: torch.zeros_like(parameter) for key in keys}}


@torch.no_grad()
def _of_sgd(parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {"momentum_buffer": torch.zeros_like(parameter)} if group["momentum"] else {}
