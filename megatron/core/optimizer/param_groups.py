"""Parameter groups of the optimizer and the scheduler."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from megatron.core.optimizer.muon import uses_muon
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.param_overrides import decays, factors_of_width, is_hidden


def get_param_groups(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]], config: OptimizerConfig, *, width_mult: float = 1.0
) -> list[dict[str, Any]]:
    """Split the trainable parameters into parameter groups, in a fixed order and without empty ones.

    A group has ``wd_mult`` (0 for biases, for parameters of one dimension and for embeddings with
    ``embedding_init_method_std``, else 1), ``is_decoupled_lr`` (embedding and
    output layer, where ``config.decoupled_lr`` is set), and ``max_lr`` and ``min_lr`` for the scheduler. Where rates scale
    with the width, it has ``lr_mult`` and, with adam, ``eps`` too. With muon it has ``use_muon``: matrices that Muon updates,
    whose rates do not scale with the width.

    Args:
        named_parameters: names of the unwrapped model with its (sharded) parameters; a parameter with two names counts
            once.
        width_mult: width of a model with maximal update parametrisation, in multiples of the base width: with adam, hidden
            matrices have rate and eps divided by it, with sgd all others have the rate multiplied by it.

    Raises:
        ValueError: no parameter is trainable.

    Ranks: each alone; a pipeline stage may lack a group that others have, such as that of decoupled rates.
    Source: Megatron-LM's rules for weight decay and widths; arXiv:2203.03466 table 8.
    """
    groups: dict[tuple[float, bool, float, float, bool], dict[str, Any]] = {}
    seen: set[int] = set()
    for name, parameter in named_parameters:
        if not parameter.requires_grad or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        decoupled = config.decoupled_lr is not None and getattr(parameter, "is_embedding_or_output_parameter", False)
        is_muons = config.optimizer == "muon" and uses_muon(parameter)
        width = 1.0 if is_muons else width_mult
        lr_mult, eps_mult = factors_of_width(config, width, is_hidden=is_hidden(parameter, name))
        key = (
            1.0 if decays(parameter, name, config) else 0.0,
            decoupled,
            1.0 if decoupled else lr_mult,
            eps_mult,
            is_muons,
        )
        group = groups.setdefault(key, _new_group(config, *key))
        group["params"].append(parameter)
    if not groups:
        raise ValueError("the model must have a trainable parameter, got none; check requires_grad of its parameters")
    return [groups[key] for key in sorted(groups)]


def _new_group(
    config: OptimizerConfig, wd_mult: float, decoupled: bool, lr_mult: float, eps_mult: float, is_muons: bool
) -> dict[str, Any]:
    max_lr, min_lr = config.lr, config.min_lr
    if decoupled:
        max_lr = config.decoupled_lr
        min_lr = min_lr if config.decoupled_min_lr is None else config.decoupled_min_lr
    scaled: dict[str, Any] = {}
    if lr_mult != 1.0:
        assert max_lr is not None and min_lr is not None, "checked before"
        max_lr, min_lr = max_lr * lr_mult, min_lr * lr_mult
        scaled["lr_mult"] = lr_mult
    if eps_mult != 1.0:
        scaled["eps"] = config.adam_eps * eps_mult
    if config.optimizer == "muon":
        scaled["use_muon"] = is_muons
    return {
        "params": [],
        "wd_mult": wd_mult,
        "is_decoupled_lr": decoupled,
        "lr": max_lr,
        "max_lr": max_lr,
        "min_lr": min_lr,
        "weight_decay": config.weight_decay * wd_mult,
        **scaled,
    }
