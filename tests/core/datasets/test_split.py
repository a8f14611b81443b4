"""Splits, weights and blends are read as Megatron reads them."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from megatron.core.datasets.blend import get_blend_from_list, sizes_per_dataset
from megatron.core.datasets.split import (
    Split,
    convert_split_vector_to_split_matrix,
    documents_of,
    normalize,
    parse_and_normalize_split,
)
from megatron.core.datasets.utils import Split as SplitOfUtils
from megatron.core.datasets.utils import compile_helpers


def test_split_strings_become_shares() -> None:
    assert parse_and_normalize_split("99,1,0") == [0.99, 0.01, 0.0]
    assert parse_and_normalize_split("1") == [1.0, 0.0, 0.0]
    assert parse_and_normalize_split("969, 30, 1") == normalize([969, 30, 1])
    assert parse_and_normalize_split("[98;2.5;.5]") == normalize([98, 2.5, 0.5])


@pytest.mark.parametrize("split", ["", "a,b", "0,0,0", "1,1,1,1", "1..2", "110,-10,0", "nan,1,1"])
def test_wrong_split_strings_are_refused(split: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        parse_and_normalize_split(split)


def test_empty_parts_are_none() -> None:
    assert convert_split_vector_to_split_matrix([0.99, 0.01, 0.0]) == [(0.0, 0.99), (0.99, 1.0), None]
    both = convert_split_vector_to_split_matrix([0.99, 0.01, 0.0], [0.98, 0.02, 0.0])
    assert both == [(0.0, 0.98), (0.99, 1.0), None]


def test_documents_at_halves_are_rounded_to_even() -> None:
    assert documents_of((0.0, 0.9), 25).tolist() == list(range(22))
    assert documents_of((0.1, 0.3), 25).tolist() == [2, 3, 4, 5, 6, 7]


def test_data_path_with_and_without_weights() -> None:
    assert get_blend_from_list(None) is None
    assert get_blend_from_list(["a"]) == (["a"], None)
    assert get_blend_from_list(["a", "b"]) == (["a", "b"], None)
    assert get_blend_from_list(["0.3", " a ", "0.7", "b"]) == (["a", "b"], [0.3, 0.7])
    with pytest.raises(ValueError, match="weights and prefixes in turn"):
        get_blend_from_list(["0.3", "a", "b", "c"])
    with pytest.raises(ValueError, match="one corpus or more"):
        get_blend_from_list([])


@pytest.mark.parametrize("words", [["0.3", "a", "b"], ["a", "0.3", "b", "0.7"], ["0.3", "0.5", "0.7", "b"]])
def test_a_weight_at_the_place_of_a_prefix_is_explained(words: list[str]) -> None:
    with pytest.raises(
        ValueError, match=r"weights and prefixes in turn .*, got '.*', in which the number 0\.[35] is at"
    ):
        get_blend_from_list(words)


def test_a_corpus_may_have_a_number_for_a_name(tmp_path: Path) -> None:
    (tmp_path / "2024.idx").touch()
    with contextlib.chdir(tmp_path):
        assert get_blend_from_list(["2024", "a", "b"]) == (["2024", "a", "b"], None)
        assert get_blend_from_list(["0.3", "2024"]) == (["2024"], [0.3])


def test_surplus_is_rounded_up_twice() -> None:
    assert sizes_per_dataset([0.3, 0.7], [100, 10, 0], surplus=0.005) == [[31, 4, 0], [71, 8, 0]]
    assert sizes_per_dataset([0.3, 0.7], [101, 10, 0]) == [[31, 3, 0], [71, 7, 0]]


def test_names_of_utils_are_the_same_objects() -> None:
    assert SplitOfUtils is Split
    compile_helpers()


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -1.0], [float("nan"), 1.0]])
def test_wrong_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="finite, not negative and not all zero"):
        normalize(weights)
