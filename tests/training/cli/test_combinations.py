"""Each combination that is not served is refused by its own row, before anything is allocated."""

from __future__ import annotations

import pytest

from megatron.training.arguments import parse_settings
from megatron.training.cli.combinations import REFUSALS
from megatron.training.cli.flag_parser import FlagError
from tests.training.cli.test_flags import MINIMAL

EXPERTS = "--num-experts 4"
NO_BIAS = "--disable-bias-linear"
GRAPH = "--cuda-graph-impl full_iteration"
# In the order of the table: flags that the row refuses, and flags that it serves instead.
CASES: list[tuple[str, str]] = [
    ("--context-parallel-size 2", "--context-parallel-size 2 --attention-dropout 0"),
    (
        "--tensor-model-parallel-size 4 --group-query-attention --num-query-groups 2",
        "--tensor-model-parallel-size 2 --group-query-attention --num-query-groups 2",
    ),
    ("--pipeline-model-parallel-size 4", "--pipeline-model-parallel-size 2"),
    (
        f"{EXPERTS} --tensor-model-parallel-size 2",
        f"{EXPERTS} --tensor-model-parallel-size 2 --sequence-parallel {NO_BIAS}",
    ),
    (
        f"{EXPERTS} --expert-tensor-parallel-size 2",
        f"{EXPERTS} --expert-tensor-parallel-size 2 {NO_BIAS}",
    ),
    (
        f"{EXPERTS} --expert-model-parallel-size 2 --moe-token-dispatcher-type allgather",
        f"{EXPERTS} --moe-token-dispatcher-type allgather",
    ),
    (
        f"{EXPERTS} --moe-router-load-balancing-type sinkhorn",
        f"{EXPERTS} --moe-router-load-balancing-type seq_aux_loss",
    ),
    (f"{GRAPH} {EXPERTS}", f"--cuda-graph-impl none {EXPERTS}"),
    (f"{GRAPH} --pipeline-model-parallel-size 2", f"{GRAPH} --tensor-model-parallel-size 2"),
]


def test_every_row_has_a_case() -> None:
    assert len(CASES) == len(REFUSALS)


@pytest.mark.parametrize("row", range(len(REFUSALS)), ids=[row.what for row in REFUSALS])
def test_row(row: int) -> None:
    refused, served = CASES[row]
    with pytest.raises(FlagError) as caught:
        parse_settings(MINIMAL + refused.split(), world_size=4)
    assert REFUSALS[row].message in str(caught.value)
    parse_settings(MINIMAL + served.split(), world_size=4)
