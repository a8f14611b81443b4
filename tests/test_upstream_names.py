"""Names that code written for Megatron-Core imports."""

from __future__ import annotations

from pathlib import Path

from tests.support import upstream_names
from tests.support.upstream_names import WHOLE_MODULE


def test_at_least_ninety_two_percent_of_imports_have_their_name() -> None:
    table = upstream_names.read_table()
    assert upstream_names.share(table) >= 0.92, upstream_names.missing(table)[:20]


def test_a_name_that_is_not_there_counts_as_missing() -> None:
    table = {"megatron.core": {"parallel_state": 3, "nothing": 2}, "megatron.nowhere": {WHOLE_MODULE: 1}}
    assert upstream_names.missing(table) == [(2, "megatron.core", "nothing"), (1, "megatron.nowhere", WHOLE_MODULE)]
    assert upstream_names.share(table) == 0.5


def test_layers_of_an_optional_package_are_read_from_the_source() -> None:
    module = "megatron.core.extensions.transformer_engine"
    assert upstream_names.missing({module: {"TENorm": 2, "TENothing": 1}}) == [(1, module, "TENothing")]


def test_imports_of_a_checkout_are_counted_once_for_each_file(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "from megatron.core import parallel_state\n"
        "def f():\n    from megatron.core import parallel_state, nothing\n"
        "from megatron.bridge import AutoBridge\nfrom megatron.core.inference import engines\nimport megatron.core.timers\n"
    )
    (tmp_path / "b.py").write_text("from megatron.core import parallel_state\n")
    (tmp_path / "c.py").write_text("from megatron.core import (\n")
    table = upstream_names.read_checkout(tmp_path)
    assert table == {"megatron.core": {"parallel_state": 2, "nothing": 1}, "megatron.core.timers": {WHOLE_MODULE: 1}}
