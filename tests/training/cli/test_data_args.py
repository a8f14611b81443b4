"""Files with data paths stand for the flags that would name them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.training.arguments import check_command_line, parse_settings
from tests.training.cli.test_flags import MINIMAL

PLAIN = [flag for flag in MINIMAL if flag != "--mock-data"]


def test_a_file_has_a_blend(tmp_path: Path) -> None:
    blend = tmp_path / "blend.txt"
    for encoding in ("utf-8", "utf-8-sig"):  # the second one begins with a byte order mark
        blend.write_text("30 first_text_document\n70 second_text_document\n", encoding=encoding)
        data = parse_settings([*PLAIN, "--data-args-path", str(blend)], world_size=1).data
        assert data.data_path == ("30", "first_text_document", "70", "second_text_document")


def test_a_file_has_the_blends_of_the_splits(tmp_path: Path) -> None:
    blends = tmp_path / "blends.json"
    blends.write_text('{"train": [1, "a", "2", "b"], "valid": "c"}')
    data = parse_settings([*PLAIN, "--per-split-data-args-path", str(blends)], world_size=1).data
    assert (data.train_data_path, data.valid_data_path, data.test_data_path) == (("1", "a", "2", "b"), ("c",), None)


@pytest.mark.parametrize(
    ("flag", "text", "more", "message"),
    [
        ("--data-args-path", None, "", "--data-args-path must name a file, got "),
        ("--data-args-path", " \n", "", "must hold prefixes, or weights and prefixes in turn, got nothing"),
        ("--data-args-path", "a", "--data-path b", "--data-args-path stands for --data-path; give one of the two"),
        ("--data-args-path", "1 a 2", "", "--data-path: "),
        ("--per-split-data-args-path", "a b", "", "--per-split-data-args-path"),
        ("--per-split-data-args-path", '{"training": "a"}', "", "keys among train, valid, test, got"),
        ("--per-split-data-args-path", '{"train": 1}', "", "each split must have a list, or a string"),
        ("--per-split-data-args-path", '{"train": [["a"]]}', "", "each split must have a list, or a string"),
        ("--per-split-data-args-path", '{"train": [NaN, "a"]}', "", "each split must have a list, or a string"),
        (
            "--per-split-data-args-path",
            f'{{"train": [1{400 * "0"}, "a"]}}',
            "",
            "each split must have a list, or a string",
        ),
        ("--per-split-data-args-path", '{"train": [{"--save": "x"}]}', "", "each split must have a list, or a string"),
    ],
)
def test_what_such_a_file_may_not_be_is_one_fault(
    flag: str, text: str | None, more: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "args"
    if text is not None:
        path.write_text(text)
    (fault,) = check_command_line([*PLAIN, flag, str(path), *more.split()], world_size=1).faults
    assert message in fault
    without_paths = check_command_line([*PLAIN, flag, str(path), *more.split()], world_size=1, paths_exist=False)
    assert len(without_paths.faults) == (text is not None)
