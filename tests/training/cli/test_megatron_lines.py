"""Real launch lines of Megatron-LM start unedited, or are refused for parts of a model or a schedule alone."""

from __future__ import annotations

import pytest

from megatron.training.arguments import CheckedLine, check_command_line
from tests.support.megatron_lines import LaunchLine, launch_lines

PARTS = {
    "linear attention": "--experimental-attention-variant --linear-attention-freq "
    "--linear-conv-kernel-dim --linear-key-head-dim --linear-num-key-heads --linear-num-value-heads --linear-value-head-dim",
}
"""Parts of a model or a schedule that are not served yet, with the flags that ask for them."""

_OF_PARTS = {flag for flags in PARTS.values() for flag in flags.split()}

REFUSED = {
    "example/gptoss": "--num-layers must be a multiple of the pipeline stages",
    "gpt/gpt3_mcore_reruns_resume_check_grads": "--seed: invalid int value: 'PATH'",
    "gpt/gpt3_mcore_te_tp2_pp1_modelopt_distill_resume": "--export-te-mcore-model is refused",
    "gpt/gpt3_mcore_te_tp2_pp1_modelopt_distill_resume_1node": "--export-te-mcore-model is refused",
}
"""Lines without any such part that are refused, and the opening of the first reason."""


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


def test_lines_start_unedited_where_all_parts_of_the_model_are_served(
    checked: dict[str, tuple[LaunchLine, CheckedLine]],
) -> None:
    needs_none = {name: result for name, (line, result) in checked.items() if not line.flags & _OF_PARTS}
    refused = {name: result.faults[0] for name, result in needs_none.items() if result.faults}
    assert len(checked) == 174 and len(needs_none) == 171
    assert refused.keys() == REFUSED.keys()
    assert all(refused[name].startswith(opening) for name, opening in REFUSED.items()), refused
    assert len(needs_none) - len(refused) >= 167


def test_other_lines_are_refused_for_these_parts_alone(checked: dict[str, tuple[LaunchLine, CheckedLine]]) -> None:
    others = {name: result for name, (line, result) in checked.items() if line.flags & _OF_PARTS}
    for name, result in others.items():
        assert result.faults, name
        wrong = [
            fault for fault in result.faults if fault.split()[0].strip(":") not in _OF_PARTS and not _is_uneven(fault)
        ]
        assert wrong == [], name


def _is_uneven(fault: str) -> bool:
    """Return whether Megatron-LM would refuse the line, too: its stages do not divide its layers."""
    return fault.startswith("--num-layers must be a multiple of the pipeline stages")


def test_reasons_are_short(checked: dict[str, tuple[LaunchLine, CheckedLine]]) -> None:
    for _, result in checked.values():
        assert all(len(fault.splitlines()) == 1 and len(fault) < 330 for fault in result.faults)
