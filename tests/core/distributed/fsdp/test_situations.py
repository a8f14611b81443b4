"""What users do around a training step: ours comes out as the unsharded model, or says that it does not serve it.

``python -m tests.core.distributed.fsdp.situations`` prints the table, also with what PyTorch's FSDP2 makes of each row.
"""

from __future__ import annotations

import pytest

from tests.core.distributed.fsdp.situations.table import EAGER, run_rows, situations, verdicts

# Rows that FSDP2 serves and ours refuses: each with the reason.
_ALL_MUST_FOLLOW = "the other ranks' parts are gathered once a step, and a rank alone cannot know that all have written"
REFUSED_THOUGH_FSDP2_SERVES_THEM: dict[str, str] = {
    "a_foreach_write_between_microbatches [optim]": _ALL_MUST_FOLLOW,
    "a_write_between_microbatches [optim]": _ALL_MUST_FOLLOW,
    "a_gradient_of_the_input_as_the_first_forward": "transforms of torch.func are refused as a whole; FSDP2 gets others wrong",
    "a_pickled_flat_optimizer": "FSDP2 has no such optimizer: the column is that of AdamW",
}


@pytest.mark.parametrize("name", situations(EAGER))
def test_ours_is_right_or_refuses(name: str) -> None:
    verdicts("ours", EAGER)[name].assert_serves(situations(EAGER)[name])


def test_what_fsdp2_serves_is_served() -> None:
    refused = [name for name, verdict in verdicts("ours", EAGER).items() if verdict.word == "refused"]
    served = {name for name, verdict in run_rows("fsdp2", refused).items() if verdict.word == "right"}
    assert served == set(REFUSED_THOUGH_FSDP2_SERVES_THEM)
