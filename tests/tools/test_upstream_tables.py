"""Tables of what Megatron-LM has are what the scripts write from the facts in ``../shared``."""

from __future__ import annotations

import pytest

from megatron.core.upstream_defaults import DEFAULTS as OF_FIELDS
from megatron.training.cli.upstream_defaults import DEFAULTS as OF_FLAGS
from tests.support.megatron_lines import FIXTURE, compact
from tests.support.shared_facts import shared_facts
from tools import upstream_defaults, upstream_flags


def test_the_table_of_flags_is_what_the_script_writes_from_the_facts() -> None:
    flags = shared_facts("flags.json")
    assert len(flags) == 878
    assert upstream_flags.table_of(flags) == upstream_flags.TABLE.read_text(encoding="utf-8")


def test_the_table_of_flags_whose_defaults_differ_is_what_the_script_writes_from_the_facts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = shared_facts("flags.json")
    written = upstream_defaults.OF_FLAGS.read_text(encoding="utf-8")
    assert upstream_defaults.table_of_flags(flags) == written
    # Another default there is a row more.
    monkeypatch.setitem(upstream_defaults.WORDS, "--adam-beta1", "another")
    flags["--adam-beta1"]["default"] = "0.8"
    assert upstream_defaults.table_of_flags(flags) == written.replace(
        "DEFAULTS: dict[str, tuple[object, object, str]] = {\n",
        "DEFAULTS: dict[str, tuple[object, object, str]] = {\n    \"--adam-beta1\": (0.8, 0.9, 'another'),\n",
    )


def test_the_table_of_fields_whose_defaults_differ_is_what_the_script_writes() -> None:
    assert upstream_defaults.table_of_fields() == upstream_defaults.OF_FIELDS.read_text(encoding="utf-8")


def test_there_are_no_words_about_defaults_that_do_not_differ() -> None:
    assert upstream_defaults.WORDS.keys() == OF_FIELDS.keys() | OF_FLAGS.keys()


def test_the_launch_lines_are_those_of_the_facts() -> None:
    assert compact(shared_facts("launch_lines.json")) == FIXTURE.read_text(encoding="utf-8")
