"""What users do around a training step: ours comes out as the unsharded model, or says that it does not serve it.

``python -m tests.core.distributed.fsdp.situations`` prints the table, also with what PyTorch's FSDP2 makes of each row.
"""

from __future__ import annotations

import re

import pytest

from tests.core.distributed.fsdp.situations.red import RED
from tests.core.distributed.fsdp.situations.table import situations, verdicts

# Rows that FSDP2 serves and ours refuses: each with the reason.
REFUSED_THOUGH_FSDP2_SERVES_THEM: dict[str, str] = {}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.xfail(reason=RED[name], strict=True)) if name in RED else name
        for name in situations()
    ],
)
def test_ours_is_right_or_refuses(name: str) -> None:
    row, verdict = situations()[name], verdicts("ours")[name]
    if verdict.word == "refused" and row.refuses is not None:
        assert re.search(row.refuses, verdict.reason), f"refused with another message: {verdict.reason}"
    else:
        assert verdict.word == "right", f"{verdict.word}: {verdict.reason}"


def test_what_fsdp2_serves_is_served() -> None:
    ours, theirs = verdicts("ours"), verdicts("fsdp2")
    refused = {name for name, verdict in ours.items() if verdict.word == "refused" and theirs[name].word == "right"}
    assert refused - set(RED) == set(REFUSED_THOUGH_FSDP2_SERVES_THEM)


def test_red_rows_are_rows() -> None:
    assert set(RED) <= set(situations())
