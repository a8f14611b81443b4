"""A script for Megatron-LM gets the settings and notices of ``pretrain_gpt.py`` with the same command line."""

from __future__ import annotations

import pytest

from megatron.training.arguments import Settings, parse_and_validate_args
from megatron.training.global_vars import unset_global_variables
from megatron.training.library.flags import settings_of
from tests.support.golden_settings import changes, golden_text
from tests.support.megatron_lines import LaunchLine


@pytest.mark.xfail(strict=True, reason="the library maps arguments to settings by itself")
def test_launch_lines_have_the_settings_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_library(line: LaunchLine, ranks: int) -> Settings:
        monkeypatch.setattr("sys.argv", ["train.py", *line.argv])
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        try:
            return settings_of(parse_and_validate_args())
        finally:
            unset_global_variables()

    assert changes(golden_text(by_library)) == ""
