"""Real launch lines of Megatron-LM start unedited; a few are refused, for reasons that are known."""

from __future__ import annotations

import pytest

from megatron.training.arguments import CheckedLine, check_command_line
from tests.support.megatron_lines import LaunchLine, launch_lines

REFUSED = {
    "example/gptoss": "--num-layers must be a multiple of the pipeline stages",
    "gpt/gpt3_mcore_reruns_resume_check_grads": "--seed must be a whole number, got PATH",
    "gpt/gpt3_mcore_te_tp2_pp1_modelopt_distill_resume": "--export-te-mcore-model is refused",
    "gpt/gpt3_mcore_te_tp2_pp1_modelopt_distill_resume_1node": "--export-te-mcore-model is refused",
}
"""Lines that are refused, and the opening of the first reason."""


def check(line: LaunchLine) -> CheckedLine:
    """Check a line for the ranks that it needs, or the number among some that it fits best."""
    choices = [line.ranks] if line.ranks else [8, 16, 64, 256]
    for ranks in choices:
        checked = check_command_line(line.argv, world_size=ranks)
        if not any("ranks" in fault for fault in checked.faults):
            break
    return checked


@pytest.fixture(scope="module")
def checked() -> dict[str, tuple[LaunchLine, CheckedLine]]:
    return {line.name: (line, check(line)) for line in launch_lines()}


def test_lines_start_unedited(checked: dict[str, tuple[LaunchLine, CheckedLine]]) -> None:
    refused = {name: result.faults[0] for name, (_, result) in checked.items() if result.faults}
    assert len(checked) == 174 and refused.keys() == REFUSED.keys()
    assert all(refused[name].startswith(opening) for name, opening in REFUSED.items()), refused


def test_reasons_are_short(checked: dict[str, tuple[LaunchLine, CheckedLine]]) -> None:
    for _, result in checked.values():
        assert all(len(fault.splitlines()) == 1 and len(fault) < 330 for fault in result.faults)
