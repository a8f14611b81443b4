"""Steps that cannot be reported: with a second profiler, inside of others, and steps that raise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import profile

from megatron.core.distributed.fsdp.overlap_report import OverlapReport
from megatron.core.distributed.fsdp.runtime.context import FsdpContext


def _report(folder: Path, step: Any = 1) -> OverlapReport:
    return OverlapReport(folder, FsdpContext(torch.device("cpu")), step=step)


def test_a_second_profiler_is_an_error_and_no_crash(tmp_path: Path) -> None:
    """One that was made before, too; afterwards profiles are as ever."""
    report, before = _report(tmp_path), profile()
    with (
        pytest.raises(RuntimeError, match="no profiler of torch may begin while an overlap report records"),
        report.step(),
    ):
        before.start()
    assert not torch._C._autograd._profiler_enabled()
    with profile() as own:
        torch.ones(2).sum()
        with pytest.raises(RuntimeError, match="got one that runs"), _report(tmp_path).step():
            pass
    assert any(event.key == "aten::sum" for event in own.key_averages())


def test_steps_inside_of_steps_are_an_error(tmp_path: Path) -> None:
    report, other = _report(tmp_path, 5), _report(tmp_path, 5)
    with pytest.raises(RuntimeError, match="in no other one, got one in another report's"), report.step(), other.step():
        pass
    report = _report(tmp_path, 5)
    with pytest.raises(RuntimeError, match="in no other one, got one in its own"), report.step(), report.step():
        pass
    with report.step():
        pass


def test_a_step_that_raises_is_not_reported(tmp_path: Path) -> None:
    report = _report(tmp_path / "none")
    with pytest.raises(KeyError), report.step():
        raise KeyError
    with report.step():
        pass
    assert report.is_done and report.path is None and not (tmp_path / "none").exists()


def test_the_step_is_a_whole_number(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="step of an overlap report must be a whole number, got '4'"):
        _report(tmp_path, "4")


def test_a_folder_that_cannot_be_written_is_told_at_the_start_and_later_stops_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        _report(tmp_path / "file")
    report = _report(tmp_path / "new" / "folder")
    assert not (tmp_path / "new").exists()
    with report.step():
        (tmp_path / "new").write_text("")
    assert report.is_done and report.path is None
    assert caplog.text.count("the overlap report of step 1 could not be written: ") == 1
