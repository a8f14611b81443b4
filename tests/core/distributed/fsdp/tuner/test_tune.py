"""What was chosen is kept in a file, which serves runs of the same kind alone and is refused if it is not ours."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp.tuner import Choice, Place, Request, Trial, Tuned, Visit, tune
from megatron.core.distributed.fsdp.tuner.tuned_file import TunedFile

_DEPTH = Choice(name="depth", options=[{"depth": 2}])


class _Worker:
    """Answers at once: a depth of 2 takes half the time."""

    num_started = 0

    def __init__(self, trial: Trial, place: Place) -> None:
        type(self).num_started += 1

    def ask(self, request: Request) -> None:
        seconds = 1.0 / request.settings.get("depth", 1)
        self.found = Visit(seconds=(seconds,) * 4, peak_nbytes=0, spare_nbytes=0, total_nbytes=0)

    def answer(self, within_s: float) -> Visit:
        return self.found

    def kill(self) -> None:
        pass


def _build(settings: Mapping[str, Any]) -> None:
    raise AssertionError("workers of this test build nothing")


_TRIAL = Trial(build=_build, step=print)


def _tune(
    file: Path | None,
    said: list[str],
    trial: Trial = _TRIAL,
    choices: Sequence[Choice] = (_DEPTH,),
    seconds: float = 600.0,
    say: Callable[[str], None] | None = None,
    **of: str,
) -> Tuned:
    return tune(
        trial,
        choices,
        of={"model": "small", **of},
        file=file,
        seconds=seconds,
        device=torch.device("cpu"),
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        start=_Worker,
        say=say or said.append,
    )


def test_the_first_run_writes_and_the_next_one_reads_and_says_so(tmp_path: Path) -> None:
    said: list[str] = []
    file = tmp_path / "new" / "tuned.json"
    first = _tune(file, said)
    assert (first.settings, first.from_file) == ({"depth": 2}, False)
    assert "has no settings for this run. Measuring, for about 600 s at most" in said[0]
    assert any(line.startswith(" fsdp tune: depth=2: 500.00 ms a step (noise 0.00") for line in said)
    assert "as given  1000.00 ms" in said[-3] and "depth=2   500.00 ms" in said[-3], "a table at the end"
    assert said[-2].startswith(
        " fsdp tune: chosen: depth=2; 500.00 ms a step for 1000.00 as given, 50.0% less: depth: "
    )
    assert "written to" in said[-1]
    said.clear()
    before = _Worker.num_started
    again = _tune(file, said)
    assert again == Tuned(settings={"depth": 2}, reason=first.reason, from_file=True)
    assert _Worker.num_started == before and len(said) == 1
    assert f"the settings of {file}, measured 20" in said[0] and "depth=2" in said[0]


def test_another_model_is_measured_anew_and_both_are_kept(tmp_path: Path) -> None:
    said: list[str] = []
    file = tmp_path / "tuned.json"
    _tune(file, said)
    said.clear()
    assert not _tune(file, said, model="large").from_file
    assert "it has others, and the nearest differs: model small there and large here. Measuring" in said[0]
    assert _tune(file, said).from_file and _tune(file, said, model="large").from_file


@pytest.mark.parametrize(
    ("name", "value"), [("version of torch", "1.13"), ("devices", "H100"), ("number of ranks", "8")]
)
def test_what_was_measured_elsewhere_is_not_taken(tmp_path: Path, name: str, value: str) -> None:
    said: list[str] = []
    file = tmp_path / "tuned.json"
    _tune(file, said)
    content = json.loads(file.read_text())
    content["entries"][0]["of"][name] = value
    del content["entries"][0]["crc32"]
    file.write_text(json.dumps(content))
    said.clear()
    assert not _tune(file, said).from_file
    assert f"the nearest differs: {name} {value} there and " in said[0]


def test_a_flipped_bit_is_refused_with_the_files_name(tmp_path: Path) -> None:
    """A digit would be another setting, or another reason not to measure."""
    said: list[str] = []
    file = tmp_path / "tuned.json"
    chosen, whole = _tune(file, said).settings, file.read_bytes()
    for bit in range(0, 8 * len(whole), 3):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        try:
            entries = TunedFile(file).entries
        except ValueError as error:
            assert str(file) in str(error), error
        else:  # a space
            assert [entry.settings for entry in entries] == [chosen], bit
    file.write_bytes(whole.replace(b'"depth": 2', b'"depth": 4'))
    with pytest.raises(ValueError, match=r"must have its checksum \(crc32\), got another.* delete crc32"):
        TunedFile(file)


def test_ranks_on_other_hosts_are_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight ranks of one host have other links between them than four on each of two."""
    said: list[str] = []
    file = tmp_path / "tuned.json"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    _tune(file, said)
    assert _tune(file, said).from_file
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    said.clear()
    assert not _tune(file, said).from_file
    assert "the nearest differs: ranks on each host 8 there and 4 here" in said[0]


def test_what_was_measured_holds_where_the_file_was_damaged_meanwhile(tmp_path: Path) -> None:
    said: list[str] = []
    file = tmp_path / "tuned.json"

    def say(line: str) -> None:
        said.append(line)
        file.write_text("of another program")

    assert _tune(file, said, say=say).settings == {"depth": 2}
    assert "must be a file of tuned settings, got something else" in said[-1]
    assert said[-1].endswith("the next run will measure again") and file.read_text() == "of another program"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "Expecting property name"),
        ("[" * 100_000, "maximum recursion depth exceeded"),
        ("[]", "it says not that it is one"),
        ('{"format": "another"}', "it says not that it is one"),
        ("VERSION", "its version must be 1, got 2"),
        ("ENTRY", "an entry lacks 'settings'"),
        ("SECONDS", "an entry lacks int too large"),
    ],
)
def test_a_file_that_is_none_of_ours_is_refused_and_kept(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "tuned.json"
    _tune(file, [])
    content = json.loads(file.read_text())
    if text == "VERSION":
        text = json.dumps({**content, "version": 2})
    elif text == "ENTRY":
        del content["entries"][0]["settings"]
        text = json.dumps(content)
    elif text == "SECONDS":
        content["entries"][0]["too_few_seconds"] = 10**400
        text = json.dumps(content)
    file.write_text(text)
    with pytest.raises(ValueError, match=f"must be a file of tuned settings, got something else .{why}"):
        _tune(file, [])
    assert file.read_text() == text


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    before, said = _Worker.num_started, list[str]()
    for file in ("/proc/none/tuned.json", "/proc/tuned.json"):
        with pytest.raises(OSError, match=rf"^{file} must be a file that can be written, got: "):
            _tune(Path(file), said)
    with pytest.raises(ValueError, match="must be a file of tuned settings, got a folder"):
        _tune(tmp_path, said)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"got something else \(it is no regular file\)"):
        _tune(tmp_path / "pipe", said)
    assert _Worker.num_started == before and said == []


def test_other_choices_are_measured_anew(tmp_path: Path) -> None:
    said: list[str] = []
    file = tmp_path / "tuned.json"
    _tune(file, said)
    said.clear()
    other = Choice(name="depth", options=[{"depth": 3}, {"depth": 4, "kind": [1, 2]}])
    assert not _tune(file, said, choices=[other]).from_file
    assert "choices depth of depth=2 there and depth of depth=3, depth=4 kind=[1, 2] here" in said[0]


def test_what_was_not_measured_is_measured_where_there_is_more_time(tmp_path: Path) -> None:
    said: list[str] = []
    file = tmp_path / "tuned.json"
    assert _tune(file, said, seconds=0.0).settings == {}
    said.clear()
    assert _tune(file, said, seconds=0.0).from_file
    assert "0 s were too few to measure all candidates; give more to measure again, or delete the file" in said[1]
    assert _tune(file, said).settings == {"depth": 2}
    assert "has settings for this run, for which 0 s were too few. Measuring" in said[2]
    assert _tune(file, said, seconds=0.0) == _tune(file, said)


def test_functions_that_other_processes_cannot_call_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must be of a module.*define them at the top of a file"):
        _tune(None, [], Trial(build=lambda settings: None, step=print))


def test_where_there_is_nothing_to_choose_nothing_is_measured(tmp_path: Path) -> None:
    said: list[str] = []
    before = _Worker.num_started
    assert _tune(tmp_path / "tuned.json", said, choices=[]).settings == {}
    assert said == [" fsdp tune: there is nothing to choose for this run"]
    assert _Worker.num_started == before and not (tmp_path / "tuned.json").exists()


@pytest.mark.parametrize("value", [torch.bfloat16, (1, 2), {1: "a"}, float("nan")], ids=str)
def test_settings_that_are_no_plain_json_are_refused_before_anything_is_measured(tmp_path: Path, value: Any) -> None:
    """They failed when the file was written, after minutes; and a tuple came back as a list."""
    before = _Worker.num_started
    with pytest.raises(ValueError, match=r"settings of the choice 'dtype' must be plain JSON .* got dtype="):
        _tune(tmp_path / "tuned.json", [], choices=[_DEPTH, Choice(name="dtype", options=[{"dtype": value}])])
    assert _Worker.num_started == before and not (tmp_path / "tuned.json").exists()
    later = Choice(name="dtype", options=lambda best: [{"dtype": value}])
    with pytest.raises(ValueError, match="must be plain JSON"):
        _tune(None, [], choices=[later])
