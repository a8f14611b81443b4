"""The schedule's formulas on hand-computed numbers, and what a resume does with a changed schedule."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


def _scheduler(**changes: Any) -> OptimizerParamScheduler:
    settings: dict[str, Any] = {
        "init_lr": 0.0,
        "max_lr": 1.0,
        "min_lr": 0.1,
        "lr_warmup_steps": 10,
        "lr_decay_steps": 110,
        "lr_decay_style": "linear",
        "start_wd": 0.5,
        "end_wd": 0.5,
        "wd_incr_steps": 100,
        "wd_incr_style": "constant",
    }
    return OptimizerParamScheduler(
        SimpleNamespace(param_groups=[{"wd_mult": 1.0}, {"wd_mult": 0.0}]), **settings | changes
    )


def _lr_after(steps: int, **changes: Any) -> float:
    scheduler = _scheduler(**changes)
    scheduler.step(steps)
    return scheduler.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("style", "steps", "expected"),
    [
        ("linear", 0, 0.0),
        ("linear", 5, 0.5),
        ("linear", 10, 1.0),
        ("linear", 60, 0.55),
        ("linear", 110, 0.1),
        ("linear", 1000, 0.1),
        ("constant", 1000, 1.0),
        ("cosine", 60, 0.1 + 0.9 * 0.5),
        ("cosine", 35, 0.1 + 0.9 * 0.5 * (math.cos(math.pi / 4) + 1)),
        ("inverse-square-root", 40, math.sqrt(10 / 40)),
        ("inverse-square-root", 111, 0.1),
    ],
)
def test_decay_styles(style: str, steps: int, expected: float) -> None:
    assert _lr_after(steps, lr_decay_style=style) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("linear", 0.75),
        ("cosine", 0.5 * (math.cos(math.pi / 4) + 1)),
        ("minus_sqrt", 0.5),
        ("exponential", 2 * 0.5**0.25 - 1),
    ],
)
def test_wsd_stays_at_the_top_and_then_decays(style: str, expected: float) -> None:
    wsd = {"lr_decay_style": "WSD", "wsd_decay_steps": 20, "lr_wsd_decay_style": style, "min_lr": 0.0}
    assert _lr_after(90, **wsd) == 1.0
    assert _lr_after(95, **wsd) == pytest.approx(expected, abs=1e-12)
    assert _lr_after(110, **wsd) == pytest.approx(0.0, abs=1e-12)


def test_warmup_starts_at_its_initial_value() -> None:
    assert _lr_after(0, init_lr=0.2) == pytest.approx(0.2)
    assert _lr_after(5, init_lr=0.2) == pytest.approx(0.6)


def test_groups_keep_their_own_rates_and_undecayed_groups_stay_undecayed() -> None:
    scheduler = _scheduler()
    scheduler.optimizer.param_groups.append({"max_lr": 10.0, "min_lr": 5.0})
    scheduler.step(60)
    plain, undecayed, own = scheduler.optimizer.param_groups
    assert (plain["weight_decay"], undecayed["weight_decay"]) == (0.5, 0.0)
    assert own["lr"] == pytest.approx(7.5)


def test_weight_decay_grows() -> None:
    for style, expected in (("linear", 0.25), ("cosine", 0.5 * (math.cos(math.pi * 0.75) + 1))):
        scheduler = _scheduler(start_wd=0.0, end_wd=1.0, wd_incr_style=style)
        scheduler.step(25)
        assert scheduler.optimizer.param_groups[0]["weight_decay"] == pytest.approx(expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"min_lr": 2.0},
        {"min_lr": -1.0},
        {"init_lr": 2.0},
        {"lr_decay_steps": 0},
        {"lr_warmup_steps": 110},
        {"lr_decay_style": "magic"},
        {"start_wd": 0.6},
        {"wd_incr_style": "magic"},
        {"end_wd": 0.6},
        {"lr_decay_style": "WSD"},
        {"override_opt_param_scheduler": True, "use_checkpoint_opt_param_scheduler": True},
    ],
)
def test_a_schedule_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="the schedule needs"):
        _scheduler(**changes)


def test_a_resume_continues_where_the_schedule_was() -> None:
    saved = _scheduler()
    saved.step(60)
    resumed = _scheduler()
    resumed.load_state_dict(saved.state_dict())
    assert resumed.optimizer.param_groups[0]["lr"] == saved.optimizer.param_groups[0]["lr"]


def test_a_changed_schedule_is_named_unless_a_side_is_chosen() -> None:
    saved = _scheduler()
    saved.step(60)
    with pytest.raises(ValueError, match=r"max_lr: now 2.0, saved 1.0.*--override-opt-param-scheduler"):
        _scheduler(max_lr=2.0, use_checkpoint_opt_param_scheduler=False).load_state_dict(saved.state_dict())
    ours = _scheduler(max_lr=2.0, override_opt_param_scheduler=True, use_checkpoint_opt_param_scheduler=False)
    ours.load_state_dict(saved.state_dict())
    assert ours.optimizer.param_groups[0]["lr"] == pytest.approx(1.05)
    theirs = _scheduler(max_lr=2.0)  # as in Megatron-Core, where nothing is said
    theirs.load_state_dict(saved.state_dict())
    assert theirs.optimizer.param_groups[0]["lr"] == pytest.approx(0.55)


def test_a_schedule_that_megatron_core_saved_goes_on() -> None:
    scheduler = _scheduler()
    scheduler.step(60)
    others = {"init_lr", "wsd_decay_steps", "lr_wsd_decay_style"}  # it does not save them
    saved = {name: value for name, value in scheduler.state_dict().items() if name not in others}
    resumed = _scheduler(use_checkpoint_opt_param_scheduler=False)
    resumed.load_state_dict(saved)
    assert resumed.num_steps == 60 and resumed.get_wd() == 0.5
    with pytest.raises(ValueError, match="got none for end_wd"):
        resumed.load_state_dict({name: value for name, value in saved.items() if name != "end_wd"})
