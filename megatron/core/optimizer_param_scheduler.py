"""Learning rate and weight decay as functions of the number of samples seen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypedDict

LR_DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
LR_WSD_DECAY_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")
WD_INCR_STYLES = ("constant", "linear", "cosine")

_COMPARED = (
    "init_lr",
    "max_lr",
    "min_lr",
    "lr_warmup_steps",
    "lr_decay_steps",
    "lr_decay_style",
    "start_wd",
    "end_wd",
    "wd_incr_steps",
    "wd_incr_style",
    "wsd_decay_steps",
    "lr_wsd_decay_style",
)


# Megatron-Core's schedule does not save these: those of this schedule hold.
_NOT_IN_MEGATRONS = ("init_lr", "wsd_decay_steps", "lr_wsd_decay_style")


class ParamGroupOverride(TypedDict, total=False):
    """Settings of a parameter group that differ from those of the optimizer and the scheduler."""

    max_lr: float
    min_lr: float
    start_wd: float
    end_wd: float
    wd_mult: float
    eps: float
    optimizer: str


def combine_param_group_overrides(param_group_overrides: Iterable[ParamGroupOverride | None]) -> ParamGroupOverride:
    """Return the settings of all.

    Raises:
        ValueError: two say different things.
    """
    combined: dict[str, Any] = {}
    for override in param_group_overrides:
        for name, value in (override or {}).items():
            if combined.setdefault(name, value) != value:
                raise ValueError(
                    f"overrides of a parameter must agree on {name}, got conflicting values {combined[name]} and {value}"
                )
    return combined  # type: ignore[return-value]


def param_group_override_to_tuple(override: ParamGroupOverride | None) -> tuple[tuple[str, Any], ...] | None:
    """Return the settings as sorted (name, value) pairs, which can be a key; None for None."""
    return None if override is None else tuple(sorted(override.items()))


def get_canonical_lr_for_logging(param_groups: Sequence[dict[str, Any]]) -> float | None:
    """Return the rate of the first group that has the schedule's; None where there is none."""
    for group in param_groups:
        has_own = group.get("is_decoupled_lr", False) or group.get("lr_mult", 1.0) != 1.0
        if group.get("default_config", "params" in group and not has_own):
            return group.get("lr")
    return None


class HasParamGroups(Protocol):
    """An object with an optimizer's parameter groups."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


class OptimizerParamScheduler:
    """A scheduler of ``lr`` and ``weight_decay`` of each parameter group; a step is one sample in training.

    A group's own ``max_lr``, ``min_lr``, ``start_wd``, ``end_wd`` and ``wd_mult`` take precedence.

    Args:
        init_lr: learning rate at step 0 of a warm-up.
        max_lr: learning rate at the end of the warm-up.
        min_lr: learning rate at ``lr_decay_steps`` and after.
        lr_warmup_steps: steps of linear growth from ``init_lr`` to ``max_lr``.
        lr_decay_steps: step at which the decay ends, warm-up included.
        start_wd: weight decay at step 0; it grows to ``end_wd`` over ``wd_incr_steps`` by ``wd_incr_style``.
        wsd_decay_steps: length of the decay phase of ``WSD`` (warm-up, stable, decay).
        use_checkpoint_opt_param_scheduler: ``load_state_dict`` takes the saved schedule.
        override_opt_param_scheduler: ``load_state_dict`` keeps this schedule. With neither, they must be equal.

    Raises:
        ValueError: a value is out of range, or both of the last two are set.

    Ranks: local.
    Source: names and formulas are Megatron-Core's; WSD is arXiv:2404.06395.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        init_lr: float,
        max_lr: float,
        min_lr: float,
        lr_warmup_steps: float,
        lr_decay_steps: int,
        lr_decay_style: str,
        start_wd: float,
        end_wd: float,
        wd_incr_steps: int,
        wd_incr_style: str,
        use_checkpoint_opt_param_scheduler: bool = True,
        override_opt_param_scheduler: bool = False,
        wsd_decay_steps: int | None = None,
        lr_wsd_decay_style: str | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.init_lr, self.max_lr, self.min_lr = init_lr, float(max_lr), min_lr
        self.lr_warmup_steps, self.lr_decay_steps, self.lr_decay_style = lr_warmup_steps, lr_decay_steps, lr_decay_style
        self.start_wd, self.end_wd = start_wd, end_wd
        self.wd_incr_steps, self.wd_incr_style = wd_incr_steps, wd_incr_style
        self.wsd_decay_steps, self.lr_wsd_decay_style = wsd_decay_steps, lr_wsd_decay_style
        self.use_checkpoint = use_checkpoint_opt_param_scheduler
        self.override = override_opt_param_scheduler
        self.num_steps = 0
        self._check()
        self.step(0)

    def _check(self) -> None:
        rules = (
            (0 <= self.min_lr <= self.max_lr, f"0 <= min_lr <= max_lr, got {self.min_lr} and {self.max_lr}"),
            (self.init_lr <= self.max_lr, f"init_lr <= max_lr, got {self.init_lr} and {self.max_lr}"),
            (self.lr_decay_steps > 0, f"lr_decay_steps > 0, got {self.lr_decay_steps}"),
            (
                0 <= self.lr_warmup_steps < self.lr_decay_steps,
                f"0 <= lr_warmup_steps < lr_decay_steps, got {self.lr_warmup_steps} and {self.lr_decay_steps}",
            ),
            (self.lr_decay_style in LR_DECAY_STYLES, f"lr_decay_style in {LR_DECAY_STYLES}, got {self.lr_decay_style}"),
            (0 <= self.start_wd <= self.end_wd, f"0 <= start_wd <= end_wd, got {self.start_wd} and {self.end_wd}"),
            (self.wd_incr_style in WD_INCR_STYLES, f"wd_incr_style in {WD_INCR_STYLES}, got {self.wd_incr_style}"),
            (
                self.wd_incr_style != "constant" or self.start_wd == self.end_wd,
                f"start_wd == end_wd for a constant weight decay, got {self.start_wd} and {self.end_wd}",
            ),
            (
                self.lr_decay_style != "WSD"
                or (self.wsd_decay_steps is not None and self.lr_wsd_decay_style in LR_WSD_DECAY_STYLES),
                f"wsd_decay_steps and lr_wsd_decay_style in {LR_WSD_DECAY_STYLES} for WSD, "
                f"got {self.wsd_decay_steps} and {self.lr_wsd_decay_style}",
            ),
            (
                not (self.override and self.use_checkpoint),
                "at most one of override_ and use_checkpoint_opt_param_scheduler, got both",
            ),
        )
        for holds, rule in rules:
            if not holds:
                raise ValueError(f"the schedule needs {rule}")

    def get_lr(self, param_group: dict[str, Any]) -> float:
        """Compute the learning rate of a group after ``num_steps`` steps."""
        max_lr: float = param_group.get("max_lr", self.max_lr)
        min_lr: float = param_group.get("min_lr", self.min_lr)
        if self.lr_warmup_steps > 0 and self.num_steps <= self.lr_warmup_steps:
            return self.init_lr + (max_lr - self.init_lr) * self.num_steps / self.lr_warmup_steps
        if self.lr_decay_style == "constant":
            return max_lr
        if self.num_steps > self.lr_decay_steps:
            return min_lr
        if self.lr_decay_style == "inverse-square-root":
            return max(min_lr, max_lr * math.sqrt(max(self.lr_warmup_steps, 1) / max(self.num_steps, 1)))
        return min_lr + self._decay_factor() * (max_lr - min_lr)

    def _decay_factor(self) -> float:
        """Compute the decay factor: 1 at the end of the warm-up, 0 at ``lr_decay_steps``."""
        if self.lr_decay_style == "WSD":
            assert self.wsd_decay_steps is not None
            decayed = self.num_steps - (self.lr_decay_steps - self.wsd_decay_steps)
            return 1.0 if decayed <= 0 else _wsd_factor(self.lr_wsd_decay_style, decayed / self.wsd_decay_steps)
        progress = (self.num_steps - self.lr_warmup_steps) / (self.lr_decay_steps - self.lr_warmup_steps)
        return 1.0 - progress if self.lr_decay_style == "linear" else _half_cosine(progress)

    def get_wd(self, param_group: dict[str, Any] | None = None) -> float:
        """Compute the weight decay of a group after ``num_steps`` steps; None: of one without settings of its own."""
        param_group = param_group or {}
        start_wd: float = param_group.get("start_wd", self.start_wd)
        end_wd: float = param_group.get("end_wd", self.end_wd)
        if self.wd_incr_style == "constant" or self.num_steps > self.wd_incr_steps:
            wd = end_wd
        else:
            progress = self.num_steps / self.wd_incr_steps
            factor = progress if self.wd_incr_style == "linear" else _half_cosine(1.0 - progress)
            wd = start_wd + factor * (end_wd - start_wd)
        return wd * float(param_group.get("wd_mult", 1.0))

    def step(self, increment: int) -> None:
        """Count ``increment`` more steps and set the rates of all groups."""
        self.num_steps += increment
        for group in self.optimizer.param_groups:
            group["lr"] = self.get_lr(group)
            group["weight_decay"] = self.get_wd(group)

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule and its position as plain values."""
        return {name: getattr(self, name) for name in (*_COMPARED, "num_steps")}

    def check_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the saved values that differ from this schedule's, if ``load_state_dict`` would accept them.

        Raises:
            ValueError: the schedules differ and neither was chosen, or a value is missing; the message names the values.
        """
        needed = (*(name for name in _COMPARED if name not in _NOT_IN_MEGATRONS), "num_steps")
        missing = [name for name in needed if name not in state_dict]
        if missing or type(state_dict["num_steps"]) is not int or state_dict["num_steps"] < 0:
            got = f"none for {', '.join(missing)}" if missing else f"num_steps {state_dict['num_steps']!r}"
            raise ValueError(f"the saved schedule must have a value for each setting and its position, got {got}")
        saved = {name: state_dict[name] for name in _COMPARED if name in state_dict}
        differing = {name: value for name, value in saved.items() if value != getattr(self, name)}
        if differing and not self.override and not self.use_checkpoint:
            listed = ", ".join(f"{name}: now {getattr(self, name)}, saved {value}" for name, value in differing.items())
            raise ValueError(
                f"the schedule must equal that of the checkpoint, got {listed}; choose with "
                "--override-opt-param-scheduler (take the command line's) or --use-checkpoint-opt-param-scheduler"
            )
        return differing

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved position, by the saved schedule or by this one (see the class).

        Raises:
            ValueError: see ``check_state_dict``; nothing has changed then.
        """
        differing = self.check_state_dict(state_dict)
        if self.use_checkpoint:
            for name, saved in differing.items():
                setattr(self, name, saved)
            for group in self.optimizer.param_groups:
                for name in {"max_lr", "min_lr"} & differing.keys():
                    has_own = group.get("is_decoupled_lr", False) or not group.get("default_config", True)
                    if name in group and not has_own:
                        group[name] = differing[name] * group.get("lr_mult", 1.0)
        self.num_steps = 0
        self.step(state_dict["num_steps"])


def _half_cosine(progress: float) -> float:
    return 0.5 * (math.cos(math.pi * progress) + 1.0)


def _wsd_factor(style: str | None, progress: float) -> float:
    if style == "linear":
        return 1.0 - progress
    if style == "cosine":
        return _half_cosine(progress)
    if style == "minus_sqrt":
        return 1.0 - math.sqrt(progress)
    return 2.0 * math.pow(0.5, progress) - 1.0
