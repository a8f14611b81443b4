"""Real launch lines of Megatron-LM start unedited; a few are refused, for reasons that are known."""

from __future__ import annotations

import pytest

from megatron.training.arguments import CheckedLine, check_command_line
from tests.support.golden_settings import by_command_line, changes, golden_text, ranks_of
from tests.support.megatron_lines import LaunchLine, launch_lines

REFUSED = {
    "example/gptoss": "--num-layers must be a multiple of the pipeline stages",
    "gpt/gpt3_mcore_reruns_resume_check_grads": "--seed must be a whole number, got PATH",
    "gpt/gpt3_mcore_te_tp2_pp1_modelopt_distill_resume": "--export-te-mcore-model is refused",
    "gpt/gpt3_mcore_te_tp2_pp1_modelopt_distill_resume_1node": "--export-te-mcore-model is refused",
}
"""Lines that are refused, and the opening of the first reason."""


@pytest.fixture(scope="module")
def checked() -> dict[str, tuple[LaunchLine, CheckedLine]]:
    return {line.name: (line, check_command_line(line.argv, world_size=ranks_of(line))) for line in launch_lines()}


def test_lines_start_unedited(checked: dict[str, tuple[LaunchLine, CheckedLine]]) -> None:
    refused = {name: result.faults[0] for name, (_, result) in checked.items() if result.faults}
    assert len(checked) == 174 and refused.keys() == REFUSED.keys()
    assert all(refused[name].startswith(opening) for name, opening in REFUSED.items()), refused


def test_reasons_are_short(checked: dict[str, tuple[LaunchLine, CheckedLine]]) -> None:
    for _, result in checked.values():
        assert all(len(fault.splitlines()) == 1 and len(fault) < 330 for fault in result.faults)


def test_lines_keep_their_settings_and_notices() -> None:
    """After a wanted change: ``python -m tests.support.golden_settings``, and read the diff."""
    assert changes(golden_text(by_command_line)) == ""
