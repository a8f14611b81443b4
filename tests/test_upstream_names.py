"""Names that code written for Megatron-Core imports."""

from __future__ import annotations

from tests.support import upstream_names
from tests.support.upstream_names import WHOLE_MODULE


def test_at_least_eighty_percent_of_imports_have_their_name() -> None:
    table = upstream_names.read_table()
    assert upstream_names.share(table) >= 0.8, upstream_names.missing(table)[:20]


def test_a_name_that_is_not_there_counts_as_missing() -> None:
    table = {"megatron.core": {"parallel_state": 3, "nothing": 2}, "megatron.nowhere": {WHOLE_MODULE: 1}}
    assert upstream_names.missing(table) == [(2, "megatron.core", "nothing"), (1, "megatron.nowhere", WHOLE_MODULE)]
    assert upstream_names.share(table) == 0.5


def test_layers_of_an_optional_package_are_read_from_the_source() -> None:
    module = "megatron.core.extensions.transformer_engine"
    assert upstream_names.missing({module: {"TENorm": 2, "TENothing": 1}}) == [(1, module, "TENothing")]
