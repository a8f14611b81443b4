"""Parameter groups of the optimizer and the scheduler."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from megatron.core.optimizer.optimizer_config import OptimizerConfig


def get_param_groups(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]], config: OptimizerConfig
) -> list[dict[str, Any]]:
    """Split the trainable parameters into parameter groups, in a fixed order and without empty ones.

    A group has ``wd_mult`` (0 for biases and for parameters of one dimension, else 1), ``is_decoupled_lr`` (embedding and
    output layer, where ``config.decoupled_lr`` is set), and ``max_lr`` and ``min_lr`` for the scheduler.

    Args:
        named_parameters: names of the unwrapped model with its (sharded) parameters; a parameter with two names counts
            once.

    Raises:
        ValueError: no parameter is trainable.

    Ranks: each alone; a pipeline stage may lack a group that others have, such as that of decoupled rates.
    Source: Megatron-LM's rule for weight decay.
    """
    groups: dict[tuple[float, bool], dict[str, Any]] = {}
    seen: set[int] = set()
    for name, parameter in named_parameters:
        if not parameter.requires_grad or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        wd_mult = 0.0 if name.endswith(".bias") or parameter.dim() <= 1 else 1.0
        decoupled = config.decoupled_lr is not None and getattr(parameter, "is_embedding_or_output_parameter", False)
        group = groups.setdefault((wd_mult, decoupled), _new_group(config, wd_mult, decoupled))
        group["params"].append(parameter)
    if not groups:
        raise ValueError("the model must have a trainable parameter, got none; check requires_grad of its parameters")
    return [groups[key] for key in sorted(groups)]


def _new_group(config: OptimizerConfig, wd_mult: float, decoupled: bool) -> dict[str, Any]:
    max_lr, min_lr = config.lr, config.min_lr
    if decoupled:
        max_lr = config.decoupled_lr
        min_lr = min_lr if config.decoupled_min_lr is None else config.decoupled_min_lr
    return {
        "params": [],
        "wd_mult": wd_mult,
        "is_decoupled_lr": decoupled,
        "lr": max_lr,
        "max_lr": max_lr,
        "min_lr": min_lr,
        "weight_decay": config.weight_decay * wd_mult,
    }
