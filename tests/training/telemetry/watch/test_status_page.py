"""The status page holds what it shows, and shows it in a browser without anything else."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.browser import browser
from tests.training.telemetry.watch.test_run_watch import status_of
from tests.training.telemetry.watch.watched import LAUNCH_LINE, board, values_of


def test_texts_end_no_script_and_become_no_markup(tmp_path: Path) -> None:
    made = board(tmp_path, stop=3)
    made.history.add_event("warning", 3, 1.7e9, "<img src=x onerror=alert(1)>&amp;")
    made.write(0.0)
    text = (tmp_path / "status.html").read_text()
    assert text.count("</script>") == 2 and "<img" not in text and "document.title=1</script>" not in text
    status = status_of(tmp_path / "status.html")
    assert status["about"]["texts"][0] == ["Launch line", LAUNCH_LINE]
    assert status["events"][-1][-1] == "<img src=x onerror=alert(1)>&amp;"


def test_the_page_names_no_other_address() -> None:
    from megatron.training.telemetry.watch import status_page

    text = (Path(status_page.__file__).parent / "status_page.html").read_text()
    assert set(re.findall(r"https?://[\w./]+", text)) == {"http://www.w3.org/2000/svg"}, "a name of a kind of elements"
    assert not re.search(r"@import|url\((?!#)|<link(?! rel=\"icon\")|src=\"", text)


def test_a_browser_shows_and_refreshes_it(tmp_path: Path) -> None:
    """Curves, texts as texts, no request but for the file; a refresh keeps scroll and zoom; an old file is an alarm."""
    made, page = board(tmp_path), tmp_path / "status.html"
    made.write(5.0)
    with browser(tmp_path) as tab:
        tab.open(page)
        assert tab.run("document.title") == '50 % · loss 2 · a "run"\\'
        assert tab.run("document.querySelectorAll('#charts svg path').length") >= 7
        assert tab.run("document.querySelector('#about pre').textContent") == LAUNCH_LINE
        assert tab.run("document.getElementById('badge').textContent") == "training"
        shown = tab.run("document.body.innerText")
        for words in (
            "50 % done, 5 min 00 s left",
            "50.6 % of the bf16 peak",
            "saved iteration 3000 in 3 s",
            "Overlap report",
        ):
            assert words in shown, words
        assert tab.run("document.documentElement.scrollWidth") == 1280
        assert len(set(tab.screenshot(tmp_path / "wide.png").read_bytes())) > 200
        # A refresh: what is new is there, and the reader is where he was.
        tab.run("statusPage.look([100, 200]); window.scrollTo(0, 400); window.mark = 7")
        made.add_line(3001, 1.7e9 + 3001, values_of(3001, loss=7.25), is_due=True)
        made.write(5.0)
        tab.run("statusPage.refresh()")
        tab.wait_until("document.title.includes('loss 7.25')")
        assert tab.run("[statusPage.view(), window.scrollY, window.mark]") == [[100, 200], 400, 7]
        # A rank from which nothing is heard.
        made.state.exposed = (3.7, 40.0, 7)
        made.set_silent([(5, "node7", 1.7e9, "a reduction of decoder.layers.3")], 1.7e9)
        made.set_silent([(5, "node7", 1.7e9, "a reduction of decoder.layers.3"), (6, "node7", 1.7e9, "set-up")], 1.7e9)
        made.write(5.0)
        tab.run("statusPage.refresh()")
        tab.wait_until("document.getElementById('badge').textContent == 'ranks are silent'")
        alarm = tab.run("document.getElementById('alarm').innerText")
        assert alarm.startswith("No sign of life from rank 5 (host node7), ") and "; rank 6 (host node7)" in alarm
        shown = tab.run("document.body.innerText")
        assert (
            "of 40 ms in iteration 7" in shown and "no sign of life from rank 6 (host node7), last at set-up" in shown
        )
        tab.run("window.scrollTo(0, 0)")
        tab.screenshot(tmp_path / "silent.png")
        made.set_silent([], 1.7e9)
        made.write(5.0)
        tab.run("statusPage.refresh()")
        tab.wait_until("document.getElementById('badge').textContent == 'training'")
        assert "signs of life again from rank 5; rank 6" in tab.run("document.body.innerText")
        # An old file, on a phone in the dark.
        old = tmp_path / "old.html"
        old.write_text(re.sub(r'"written":[\d.]+', '"written":1.7e9', page.read_text()))
        tab.open(old, width=400, height=800, dark=True)
        assert tab.run("document.getElementById('badge').textContent") == "may have stopped"
        assert "It may have stopped: look at its log." in tab.run("document.getElementById('alarm').innerText")
        assert tab.run("document.documentElement.scrollWidth") == 400
        assert tab.run("getComputedStyle(document.body).backgroundColor") == "rgb(17, 20, 26)"
        tab.screenshot(tmp_path / "phone.png")
        # One that has ended is none.
        made.end("end", "training ended: all iterations are done", 1.7e9)
        made.write(5.0)
        tab.open(page)
        assert tab.run("document.getElementById('badge').textContent") == "ended"
        assert tab.errors == []
        assert {request.split("?")[0] for request in tab.requests} == {page.as_uri(), old.as_uri()}
