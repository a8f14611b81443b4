"""A process that is forked from the warm server is to who starts it what a new interpreter would be."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.rank_processes import wait_until_gone
from tests.support.warm_python import warm_python

_TELLS = """
import os, sys
print(sys.argv[1:], os.environ["GIVEN"], os.getcwd(), "torch" in sys.modules, __name__, input())
sys.exit("words")
"""
_LEAVES_ONE_BEHIND = "import subprocess; subprocess.Popen(['sleep', '2']); print('ended', flush=True)"


def test_arguments_folder_environment_streams_and_status_are_those_of_the_program(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_TELLS)
    done = subprocess.run(
        [warm_python(), "script.py", "a", "-b"],
        cwd=tmp_path,
        env=os.environ | {"GIVEN": "given"},
        input="read\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "words\n")
    assert done.stdout == f"['a', '-b'] given {tmp_path} True __main__ read\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_reach_it_and_its_end_is_that_of_the_program(number: signal.Signals) -> None:
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"
    with subprocess.Popen([warm_python(), "-c", program], stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.send_signal(number)
        status = process.wait(timeout=60)
        assert process.stdout.read() == "", "all that hold the stream have ended"
    assert status == -number
    deadline = time.monotonic() + 60.0
    while Path(f"/proc/{pid}").exists():  # after SIGKILL of the program, which cannot wait for it
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_program_ends_when_all_have_ended_that_the_process_started() -> None:
    """So that tests which look for processes that are left behind find them."""
    command = [warm_python(), "-c", _LEAVES_ONE_BEHIND]
    with subprocess.Popen(command, stdout=-1, text=True, start_new_session=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ended\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)
        wait_until_gone([process], 60.0)
        assert process.returncode == 0


def test_what_it_starts_is_warm_too() -> None:
    program = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import sys; print(\"torch\" in sys.modules)'])"
    )
    assert subprocess.run([warm_python(), "-c", program], capture_output=True, text=True).stdout == "True\n"


def test_other_options_have_an_interpreter_of_their_own() -> None:
    program = "import sys; print('torch' in sys.modules, sys.warnoptions)"
    done = subprocess.run([warm_python(), "-W", "error", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False ['error']\n"
