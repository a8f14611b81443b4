"""Data about Megatron-LM are what the scripts write from the facts in ``../shared``, and from source text."""

from __future__ import annotations

import pytest

from megatron.training.arguments import build_parser
from tests.support import defaults_that_differ
from tests.support.megatron_lines import FIXTURE, compact
from tests.support.shared_facts import shared_facts
from tools import upstream


def test_the_file_of_flags_is_what_the_script_writes_from_the_facts() -> None:
    flags = shared_facts("flags.json")
    assert len(flags) == 878
    assert upstream.text_of_flags(flags) == upstream.FLAGS.read_text(encoding="utf-8")


def test_fields_are_read_from_the_source_of_a_dataclass() -> None:
    source = """
class Config:
    size: int = 4 * 2**2
    rate: float = float("inf")
    dtype: torch.dtype = torch.float32
    act: Callable = F.gelu
    given: int
    names: list = field(default_factory=list)
    kind: str = field(default="a", metadata={})
"""
    assert upstream.fields_of(source, "Config") == {
        "size": 16,
        "rate": float("inf"),
        "dtype": "torch.float32",
        "act": "gelu",
        "given": None,
        "names": [],
        "kind": "a",
    }


def test_defaults_that_differ_have_words(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {**defaults_that_differ.of_flags(), **defaults_that_differ.of_fields()}
    assert found.keys() == defaults_that_differ.WORDS.keys()
    # The parser takes most defaults from the table: another default is one that the parser has by itself.
    parser = build_parser()
    parser.set_defaults(adam_beta1=0.8)
    monkeypatch.setattr(defaults_that_differ, "build_parser", lambda: parser)
    monkeypatch.setitem(defaults_that_differ.WORDS, "--adam-beta1", "another")
    assert defaults_that_differ.of_flags()["--adam-beta1"] == (0.9, 0.8, "another")


def test_the_launch_lines_are_those_of_the_facts() -> None:
    assert compact(shared_facts("launch_lines.json")) == FIXTURE.read_text(encoding="utf-8")
