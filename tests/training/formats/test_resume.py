"""What a run takes of another program's run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron.training.formats.foreign import ForeignCheckpoint
from megatron.training.formats.foreign_run import ForeignRun
from megatron.training.formats.resume import goes_on, resumed_run

RUN = ForeignRun(
    path=Path("run"),
    args={"consumed_train_samples": 24, "consumed_valid_samples": 10, "seed": 7, "seq_length": 16},
    iteration=3,
    is_release=False,
    schedule={"max_lr": 0.1, "num_steps": 24},
)
OWN = {"max_lr": 0.3, "init_lr": 0.01, "wsd_decay_steps": None, "lr_wsd_decay_style": "linear"}


def test_counters_schedule_and_length_of_samples_are_taken() -> None:
    found = resumed_run(RUN, OWN, seed=7)
    assert found.state.as_dict() == {"iteration": 3, "consumed_train_samples": 24, "consumed_valid_samples": 10}
    assert found.schedule == {**OWN, "max_lr": 0.1, "num_steps": 24}
    assert found.samples == {"seq_length": 16}


def test_a_run_without_evaluations_begins_with_the_first_held_out_sample() -> None:
    args = {name: value for name, value in RUN.args.items() if name != "consumed_valid_samples"}
    assert resumed_run(replace(RUN, args=args), OWN, seed=7).state.consumed_valid_samples == 0


def test_another_order_of_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="now 8, saved 7"):
        resumed_run(RUN, OWN, seed=8)
    assert resumed_run(RUN, OWN, seed=None).state.iteration == 3
    with pytest.raises(ValueError, match="how many samples iteration 3 had consumed, got None"):
        resumed_run(replace(RUN, args={}), OWN, seed=7)


def test_optimizer_state_of_an_unknown_iteration_is_refused() -> None:
    """The file that says the iteration was lost: training would begin anew, at iteration 0, and save over the run."""
    lost = replace(RUN, iteration=None, has_state=True, file=Path("run/common.pt"))

    def found(run: ForeignRun) -> ForeignCheckpoint:
        return ForeignCheckpoint(path=run.path, kind="", architecture={}, views=lambda *_: NotImplemented, run=run)

    with pytest.raises(ValueError, match=r"common\.pt must contain the iteration of the checkpoint.*--finetune"):
        goes_on(found(lost), finetune=False)
    assert not goes_on(found(lost), finetune=True)
    assert not goes_on(found(replace(lost, has_state=False)), finetune=False), "weights alone"
