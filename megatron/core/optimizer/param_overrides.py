"""Settings of some parameters that differ from those of all others, under Megatron-Core's names."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.core.optimizer.muon import uses_muon
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer_param_scheduler import ParamGroupOverride, combine_param_group_overrides

ConfigOverrides = Mapping["ParamKey", ParamGroupOverride]


@dataclass(frozen=True)
class ParamPredicate:
    """A condition on parameters; two of one name are equal."""

    name: str
    fn: Callable[[torch.nn.Parameter], bool] = field(compare=False)

    def __call__(self, param: torch.nn.Parameter) -> bool:
        return self.fn(param)


@dataclass(frozen=True)
class ParamWithNamePredicate:
    """A condition on parameters and their names; two of one name are equal."""

    name: str
    fn: Callable[[torch.nn.Parameter, str], bool] = field(compare=False)

    def __call__(self, param: torch.nn.Parameter, name: str) -> bool:
        return self.fn(param, name)


@dataclass(frozen=True, slots=True)
class ParamKey:
    """A choice of parameters: those that match any of its fields, each of which is one value or a tuple.

    Attributes:
        name: patterns of names, as of files.
        attr: attributes that are true.
        predicate, with_name_predicate: conditions.
    """

    name: str | tuple[str, ...] = ()
    attr: str | tuple[str, ...] = ()
    predicate: ParamPredicate | tuple[ParamPredicate, ...] = ()
    with_name_predicate: ParamWithNamePredicate | tuple[ParamWithNamePredicate, ...] = ()

    def matches(self, param: torch.nn.Parameter, param_name: str) -> bool:
        """Return whether a parameter of this name is chosen."""
        return (
            any(fnmatch.fnmatch(param_name, pattern) for pattern in _tuple(self.name))
            or any(getattr(param, attr, False) for attr in _tuple(self.attr))
            or any(holds(param) for holds in _tuple(self.predicate))
            or any(holds(param, param_name) for holds in _tuple(self.with_name_predicate))
        )


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else tuple(value) if isinstance(value, list) else (value,)


def decays(parameter: torch.Tensor, name: str, config: OptimizerConfig) -> bool:
    """Return whether weight decay applies: not to biases, vectors and what asks for none."""
    if config.apply_wd_to_qk_layernorm and ("q_layernorm." in name or "k_layernorm." in name):
        return True
    return not (name.endswith(".bias") or parameter.dim() <= 1 or getattr(parameter, "skip_weight_decay", False))


def is_hidden(parameter: torch.Tensor, name: str) -> bool:
    """Return whether the rate of a parameter scales with the width: that of a matrix between the embedding and the output layer."""
    is_at_end = "embedding" in name.lower() or getattr(parameter, "is_embedding_or_output_parameter", False)
    return not (parameter.dim() <= 1 or is_at_end)


def factors_of_width(config: OptimizerConfig, width_mult: float, *, is_hidden: bool) -> tuple[float, float]:
    """Return the factors of learning rate and eps for a model that is ``width_mult`` times as wide as the tuned one."""
    if config.optimizer == "sgd":
        return (1.0 if is_hidden else width_mult), 1.0
    eps_mult = 1.0 if config.optimizer == "muon" else 1.0 / width_mult
    return (1.0 / width_mult, eps_mult) if is_hidden else (1.0, 1.0)


def get_standard_config_overrides(config: OptimizerConfig) -> dict[ParamKey, ParamGroupOverride]:
    """Return the overrides that ``get_megatron_optimizer`` makes without ``config_overrides``, to add others to them."""
    is_undecayed = ParamWithNamePredicate("undecayed", lambda param, name: not decays(param, name, config))
    overrides: dict[ParamKey, ParamGroupOverride] = {ParamKey(with_name_predicate=is_undecayed): {"wd_mult": 0.0}}
    if config.decoupled_lr is not None:
        rates: ParamGroupOverride = {"max_lr": config.decoupled_lr}
        if config.decoupled_min_lr is not None:
            rates["min_lr"] = config.decoupled_min_lr
        overrides[ParamKey(attr="is_embedding_or_output_parameter")] = rates
    return overrides


def get_mup_config_overrides(
    config: OptimizerConfig, mup_width_mult: float, optimizer_type: str = "adam"
) -> dict[ParamKey, ParamGroupOverride]:
    """Return the overrides of a model with maximal update parametrisation; see ``get_param_groups``.

    Args:
        mup_width_mult: width of the model, in multiples of the base width.
        optimizer_type: must be that of ``config``.

    Raises:
        ValueError: ``optimizer_type`` is another one, or ``config.lr`` is None.
    """
    if optimizer_type != config.optimizer or config.lr is None:
        raise ValueError(
            f"optimizer_type must be that of the config, whose lr is set, got {optimizer_type!r}, {config.optimizer!r} and "
            f"lr {config.lr}"
        )
    overrides: dict[ParamKey, ParamGroupOverride] = {}
    for hidden in (True, False):
        lr_mult, eps_mult = factors_of_width(config, mup_width_mult, is_hidden=hidden)

        def matches(param: torch.Tensor, name: str, hidden: bool = hidden) -> bool:
            of_muon = config.optimizer == "muon" and uses_muon(param)
            has_own = config.decoupled_lr is not None and getattr(param, "is_embedding_or_output_parameter", False)
            return not of_muon and not has_own and is_hidden(param, name) is hidden

        override: ParamGroupOverride = {}
        if lr_mult != 1.0:
            override |= {"max_lr": config.lr * lr_mult, "min_lr": (config.min_lr or 0.0) * lr_mult}
        if eps_mult != 1.0:
            override["eps"] = config.adam_eps * eps_mult
        if override:
            name = "hidden" if hidden else "not hidden"
            overrides[ParamKey(with_name_predicate=ParamWithNamePredicate(f"mup: {name}", matches))] = override
    return overrides


def get_overridden_param_groups(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]], config: OptimizerConfig, overrides: ConfigOverrides
) -> list[dict[str, Any]]:
    """Split the trainable parameters into parameter groups, one for each set of overrides, in a fixed order.

    Raises:
        ValueError: no parameter is trainable, an override has an unknown name, or two of a parameter contradict each other.
        NotImplementedError: an override asks for another optimizer.

    Ranks: each alone.
    """
    _check(overrides)
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    seen: set[int] = set()
    for name, parameter in named_parameters:
        if not parameter.requires_grad or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        found = combine_param_group_overrides([one for key, one in overrides.items() if key.matches(parameter, name)])
        of_muon = config.optimizer == "muon" and uses_muon(parameter)
        key = (tuple(sorted(found.items())), of_muon)
        groups.setdefault(key, _new_group(config, dict(found), of_muon))["params"].append(parameter)
    if not groups:
        raise ValueError("the model must have a trainable parameter, got none; check requires_grad of its parameters")
    return [groups[key] for key in sorted(groups)]


def _check(overrides: ConfigOverrides) -> None:
    known = ParamGroupOverride.__annotations__
    for override in overrides.values():
        if unknown := override.keys() - known.keys():
            raise ValueError(f"config_overrides must name settings among {', '.join(known)}, got {sorted(unknown)}")
        if "optimizer" in override:
            raise NotImplementedError(
                f"config_overrides must not choose an optimizer for some parameters, got {override['optimizer']!r}; "
                "with OptimizerConfig(optimizer='muon') matrices are Muon's and all else is AdamW's"
            )


def _new_group(config: OptimizerConfig, override: dict[str, Any], of_muon: bool) -> dict[str, Any]:
    rates = {"wd_mult": 1.0, "is_decoupled_lr": False, "max_lr": config.lr, "min_lr": config.min_lr, **override}
    group = {
        "params": [],
        **rates,
        "lr": rates["max_lr"],
        "weight_decay": override.get("start_wd", config.weight_decay) * rates["wd_mult"],
        "default_config": not {"max_lr", "min_lr"} & override.keys(),
    }
    return {**group, "use_muon": of_muon} if config.optimizer == "muon" else group
