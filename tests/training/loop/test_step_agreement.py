"""All ranks act at the same step on what any rank reports."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest
import torch
import torch.distributed as dist

from megatron.training.loop.step_agreement import StepAgreement, TerminationSignal
from tests.support.launch import run_ranks
from tests.support.warm_python import warm_python

_CPU = torch.device("cpu")
_FINE = torch.tensor(1.0)


def _errors_where_rank_one_has_a_bad_loss() -> list[str]:
    agreement = StepAgreement(_CPU, check_finite=True)
    messages: list[str] = []
    for loss, norm in ((1.0, 1.0), (float("nan") if dist.get_rank() == 1 else 1.0, 1.0), (1.0, float("inf"))):
        agreement.post(len(messages) + 5, torch.tensor(loss), torch.tensor(norm))
        try:
            agreement.collect()
            messages.append("fine")
        except RuntimeError as error:
            messages.append(str(error))
    return messages


def test_a_loss_that_is_not_finite_ends_all_ranks_and_names_the_one() -> None:
    zero, one = run_ranks(2, _errors_where_rank_one_has_a_bad_loss)
    assert zero == one
    fine, bad_loss, bad_norm = zero
    assert fine == "fine"
    assert "iteration 6: the loss on ranks [1]" in bad_loss
    assert "iteration 7: the norm of the gradient" in bad_norm


def _reason_where_rank_one_gets_the_signal() -> list[str | None]:
    termination = TerminationSignal()
    agreement = StepAgreement(_CPU, check_finite=False, termination=termination)
    reasons = []
    for step in range(3):
        if step == 1 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        reasons.append(agreement.collect().end_requested)
        agreement.post(step, _FINE, _FINE)
    reasons.append(agreement.collect().end_requested)
    return reasons


def test_a_signal_to_one_rank_ends_all_at_the_same_step() -> None:
    expected = [None, None, "SIGTERM was received", "SIGTERM was received"]
    assert run_ranks(2, _reason_where_rank_one_gets_the_signal) == [expected, expected]


_ENDS = """
import atexit, signal
from megatron.training.loop.step_agreement import TerminationSignal

atexit.register(lambda: print(signal.getsignal(signal.SIGTERM)))  # called after those that are registered later
TerminationSignal()
"""


def test_the_signal_is_without_effect_until_the_process_ends() -> None:
    """The interpreter gives signals with handlers in Python back to the system before it ends, which takes a while."""
    run = subprocess.run([warm_python(), "-c", _ENDS], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout == f"{signal.SIG_IGN}\n"


def _reason_after_the_deadline() -> list[str | None]:
    agreement = StepAgreement(_CPU, check_finite=True, duration_mins=1, start_time=time.time() - 61.0)
    agreement.post(1, _FINE, _FINE)
    early = StepAgreement(_CPU, check_finite=True, duration_mins=1)
    early.post(1, _FINE, _FINE)
    return [agreement.collect().end_requested, early.collect().end_requested]


def test_time_is_over_after_the_given_minutes() -> None:
    assert run_ranks(1, _reason_after_the_deadline) == [["--exit-duration-in-mins is over", None]]


def _nothing_to_agree_on() -> bool:
    agreement = StepAgreement(_CPU, check_finite=False)
    agreement.post(1, torch.tensor(float("nan")), _FINE)
    return agreement.is_needed or agreement.collect().end_requested is not None


def test_without_checks_nothing_is_sent() -> None:
    assert run_ranks(1, _nothing_to_agree_on) == [False]


@pytest.mark.parametrize("finite", [True, False])
def test_flags_are_read_once(finite: bool) -> None:
    run_ranks(1, _read_twice, finite)


def _read_twice(finite: bool) -> None:
    agreement = StepAgreement(_CPU, check_finite=True)
    agreement.post(1, torch.tensor(1.0 if finite else float("nan")), _FINE)
    if not finite:
        with pytest.raises(RuntimeError, match="must be finite"):
            agreement.collect()
    agreement.collect()
    assert agreement.collect().end_requested is None
