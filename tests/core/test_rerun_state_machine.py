"""The check of results, in the one mode that is served."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatron.core import rerun_state_machine
from megatron.core.rerun_state_machine import RerunDataIterator, RerunMode, RerunStateMachine, get_rerun_state_machine


@pytest.fixture(autouse=True)
def no_machine() -> Iterator[None]:
    rerun_state_machine.destroy_rerun_state_machine()
    yield
    rerun_state_machine.destroy_rerun_state_machine()


def test_each_step_runs_once() -> None:
    batches, seen = RerunDataIterator(iter(range(3))), []
    for _ in range(3):
        machine = get_rerun_state_machine()
        while machine.should_run_forward_backward(batches):
            seen.append(next(batches))
        assert machine.should_checkpoint_and_exit() == (False, False, 0)
    assert seen == [0, 1, 2] and machine.current_iteration == 2


def test_a_rejected_result_stops_the_run_or_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    machine = get_rerun_state_machine()
    machine.validate_result(torch.tensor(1.0), torch.isnan, message="NaN in the loss")
    with pytest.raises(RuntimeError, match="NaN in the loss"):
        machine.validate_result(torch.tensor(torch.nan), torch.isnan, message="NaN in the loss")
    assert not caplog.records
    machine.validate_result(torch.tensor(torch.nan), torch.isnan, message="NaN in the loss", fatal=False)
    assert "NaN in the loss" in caplog.text


def test_there_is_one_machine_for_each_process() -> None:
    rerun_state_machine.initialize_rerun_state_machine(mode=RerunMode.DISABLED)
    assert get_rerun_state_machine() is get_rerun_state_machine()
    with pytest.raises(RuntimeError, match="destroy"):
        rerun_state_machine.initialize_rerun_state_machine()


def test_running_a_step_twice_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="validate_results"):
        RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS)
    with pytest.raises(NotImplementedError, match="report_determinism_stats"):
        get_rerun_state_machine().set_mode(RerunMode.REPORT_DETERMINISM_STATS)
