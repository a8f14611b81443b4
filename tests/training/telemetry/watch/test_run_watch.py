"""What rank 0 hands over while it trains, and that neither a disk nor a folder that fails can stop it."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megatron.training.telemetry.watch import paced_thread
from megatron.training.telemetry.watch.paced_thread import PacedThread
from megatron.training.telemetry.watch.peak_flops import peak_tflops
from megatron.training.telemetry.watch.run_state import About
from megatron.training.telemetry.watch.run_watch import RunWatch, Scale, WatchConfig
from megatron.training.telemetry.watch.time_left import Pauses, TimeLeft
from tests.training.telemetry.watch.test_prometheus import parse
from tests.training.telemetry.watch.watched import board, record


def status_of(page: Path) -> dict[str, Any]:
    """What a page shows."""
    found = re.search(r'<script type="application/json" id="status">(.*)</script>', page.read_text())
    assert found is not None
    status: dict[str, Any] = json.loads(found[1])
    return status


def _watch(folder: Path, iteration: int = 0) -> RunWatch:
    left = TimeLeft(
        iteration=iteration,
        consumed_samples=8 * iteration,
        last_iteration=100,
        last_samples=800,
        pauses={"save": Pauses(plural="saves", interval=50)},
    )
    return RunWatch(
        WatchConfig(status_page=str(folder / "status.html"), prometheus_file=str(folder / "run.prom")),
        left,
        scale=Scale(num_devices=2, tokens_per_sample=16, flops_per_sample=10**12),
        about=About(run="test"),
        engine_memory=lambda: {"main weights": 4096},
    )


def test_a_run_is_on_the_page_from_start_to_end(tmp_path: Path) -> None:
    watch = _watch(tmp_path / "new")
    page = tmp_path / "new/status.html"
    assert status_of(page)["state"]["what"] == "start", "it is there before the first step"
    watch.add_line(record(1, is_due=False, ms_per_iteration=9000.0))
    watch.add_line(record(10))
    watch.pause("save")
    watch.saved(10, 80, is_async=False)
    watch.saved(10, 80, is_async=True)
    watch.async_saved(10)
    watch.resume()
    watch.evaluated("validation", 2.5, 10)
    watch.add_line(record(20, loss=float("nan"), nan_iterations=2, grad_norm=None, skipped_iterations=1))
    watch.end("all iterations are done", iteration=23, consumed_samples=184)  # of which the last ones had no log line
    watch.fail(RuntimeError("after the end"))
    watch.close()
    status = status_of(page)
    assert status["points"]["iteration"] == [10, 20] and status["points"]["loss"] == [3.0, None]
    assert status["points"]["grad norm"] == [1.0, None] and status["evaluations"][0][2:] == ["validation", 2.5]
    # 10 iterations of 8 samples of 16 tokens on 2 devices in 20 s.
    assert status["points"]["tokens/s/GPU"] == [32.0, 32.0] and status["points"]["TFLOP/s/GPU"] == [2.0, 2.0]
    state = status["state"]
    assert (state["what"], state["text"]) == ("end", "training ended: all iterations are done")
    assert (state["iteration"], state["consumed_tokens"], state["fraction_done"]) == (23, 2944, 0.23)
    assert state["engine_memory"] == {"main weights": 4096}
    assert (state["progress"], state["seconds_left"]) == ("23 % done", 0.0), "no end is foreseen of what has ended"
    told = [(what, text) for _, _, what, text in status["events"]]
    assert told == [
        ("start", "training starts"),
        ("save", "saved iteration 10 in 0.0 s"),
        ("save", "saved iteration 10, in the background within 0 s"),
        ("skipped", "1 iteration skipped"),
        ("nan", "2 iterations with a loss that is not finite"),
        ("end", "training ended: all iterations are done"),
    ]
    assert parse((tmp_path / "new/run.prom").read_text())
    again = _watch(tmp_path / "new", iteration=10)
    again.fail(ValueError("bad data"))
    again.close()
    status = status_of(page)
    assert status["points"]["iteration"] == [10] and status["state"]["text"] == "ValueError: bad data"
    assert "training goes on after iteration 10" in [text for *_, text in status["events"]]
    # One that is killed says nothing; the next start says where it was.
    killed = _watch(tmp_path / "new", iteration=10)
    killed.add_line(record(15))
    killed.close()
    _watch(tmp_path / "new", iteration=10).close()
    (text,) = [text for *_, text in status_of(page)["events"][-1:]]
    assert text == (
        "training goes on after iteration 10; the start before was last seen at iteration 15, and did not say how it ended"
    )


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        OSError, match=r"--status-page .*file/status.html and --prometheus-file .* must be files that rank 0 can write"
    ):
        _watch(tmp_path / "file")
    (tmp_path / "status.html").mkdir()
    with pytest.raises(OSError, match=r"--status-page .*status.html must be a file, got a folder; give .*status.html/"):
        _watch(tmp_path)


@pytest.mark.parametrize("name", ["status.html", "run.prom"])
def test_a_file_of_somebody_else_is_refused_and_kept(tmp_path: Path, name: str) -> None:
    """A mistyped name must not cost a file; an empty one, as of ``mktemp``, and those of an earlier start are taken."""
    (tmp_path / name).write_text("<html>my page</html>")
    with pytest.raises(OSError, match=rf"got: .*{name} holds something else, which would be lost; move it away"):
        _watch(tmp_path)
    assert (tmp_path / name).read_text() == "<html>my page</html>"
    assert [path.name for path in tmp_path.iterdir()] == [name], "nothing is written before all files are looked at"
    (tmp_path / name).write_text("")
    for _ in range(2):
        _watch(tmp_path).close()


def test_a_run_leaves_its_page_to_another_one_that_took_it(tmp_path: Path) -> None:
    """Two runs with one page, as of a copied launch line, would write into one history."""
    first = board(tmp_path, stop=20)
    first.write(0.0)
    second = board(tmp_path, stop=5)
    history = tmp_path / "status.history.jsonl"
    before = history.read_text()
    with pytest.raises(ValueError, match=r"status\.html must be of one run, and another one writes it by now"):
        first.write(0.0)
    assert history.read_text() == before
    second.write(0.0)
    assert status_of(tmp_path / "status.html")["points"]["iteration"] == [1, 2, 3, 4, 5]


def test_a_run_that_is_interrupted_says_so(tmp_path: Path) -> None:
    watch = _watch(tmp_path)
    watch.add_line(record(20))
    watch.fail(KeyboardInterrupt())
    watch.close()
    state = status_of(tmp_path / "status.html")["state"]
    assert (state["what"], state["text"]) == ("failure", "stopped by Ctrl-C (SIGINT)")
    assert (state["progress"], state["seconds_left"]) == ("20 % done", 0.0)


def test_what_ended_another_rank_is_written_at_once(tmp_path: Path) -> None:
    """Nothing is left to be written when this process is ended; its own error only follows."""
    watch = _watch(tmp_path)
    watch.tell_of_failure("rank 1 failed with ValueError: bad data")
    watch.fail(RuntimeError("connection closed by peer"))
    state = status_of(tmp_path / "status.html")["state"]
    assert (state["what"], state["text"]) == ("failure", "rank 1 failed with ValueError: bad data")
    watch.close()


def test_a_folder_that_goes_away_is_told_once_and_stops_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written again when it can be, with what happened meanwhile."""
    monkeypatch.setattr("megatron.training.telemetry.watch.run_watch._INTERVAL_S", 0.0)
    monkeypatch.setattr(paced_thread, "_SHARE", 1e9)
    watch = _watch(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    watch.add_line(record(10))
    _wait_until(lambda: "could not be written" in capsys.readouterr().err)
    for iteration in (20, 30):
        watch.add_line(record(iteration))
        time.sleep(0.02)
    (tmp_path / "run").mkdir()
    watch.close()
    assert capsys.readouterr().err == ""
    assert status_of(tmp_path / "run/status.html")["points"]["iteration"] == [10, 20, 30]


def test_a_disk_that_hangs_is_waited_for_at_the_end_alone_and_not_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paced_thread, "_LAST_S", 0.05)
    comes_back = threading.Event()
    thread = PacedThread(lambda pace_s: (comes_back.wait(), None)[1], interval_s=0.0)
    for _ in range(3):
        thread.post(lambda: None)
    thread.close()
    assert thread._thread.is_alive()
    comes_back.set()
    thread._thread.join(60)
    assert not thread._thread.is_alive()


def test_writing_takes_a_thousandth_of_the_time_at_most() -> None:
    """The more a writing computes, the longer is the pause after it; changes of the pause are written together."""
    calls: list[float] = []

    def write(pace_s: float) -> None:
        calls.append(pace_s)
        end = time.thread_time() + 0.003
        while time.thread_time() < end:
            pass

    thread = PacedThread(write, interval_s=0.0)
    for _ in range(50):
        thread.post(lambda: None)
        time.sleep(0.002)
    assert len(calls) == 1 and thread.pace_s >= 3.0
    thread.close()
    assert len(calls) == 2 and calls[1] >= 3.0, "the end is written at once"


def _wait_until(condition: Any) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_peaks_of_devices_by_the_names_that_drivers_give() -> None:
    names = {
        "NVIDIA H200": 989.0,
        "NVIDIA H100 80GB HBM3": 989.0,
        "NVIDIA H100 PCIe": 756.0,
        "NVIDIA A100-SXM4-80GB": 312.0,
        "NVIDIA GH200 480GB": 989.0,
        "CPU (x86_64)": None,
    }
    assert {name: peak_tflops(name) for name in names} == names
