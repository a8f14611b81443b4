"""Run of ``pretrain_gpt.py`` under torchrun, with progress and a checkpoint when it is interrupted."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from examples.training_log import IterationLine, ValidationLine, parse_line

BAR_WIDTH = 24
LINES_OF_A_FAILURE = 25
"""Lines of the log that are shown when training fails."""


class TrainingError(Exception):
    """Training failed; the message has the end of its log."""


class TrainingInterruptedError(Exception):
    """Training was interrupted; it has saved a checkpoint if it had begun."""


def train(
    script: Path, flags: Sequence[str], *, num_ranks: int, log: Path, environment: Mapping[str, str], show: TextIO
) -> None:
    """Run the script to its end; append its output to ``log`` and print progress to ``show``.

    Raises:
        TrainingError: a rank failed.
        TrainingInterruptedError: training was interrupted by Ctrl-C, SIGTERM or SIGHUP.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks), "--nnodes", "1"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(_free_port()), str(script), *flags]
    with log.open("a", encoding="utf-8") as file, _interrupts_raise():
        # Its own session: Ctrl-C in a terminal goes to all processes of the group, but the ranks must save first.
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            env={**os.environ, **environment},
        )
        assert process.stdout is not None
        last_lines: deque[str] = deque(maxlen=LINES_OF_A_FAILURE)
        try:
            for line in process.stdout:
                file.write(line)
                file.flush()
                last_lines.append(line)
                if (shown := describe(line)) is not None:
                    print(shown, file=show, flush=True)
            status = process.wait()
        except KeyboardInterrupt:
            print("\ninterrupted: saving a checkpoint", file=show, flush=True)
            _end(process, file)
            raise TrainingInterruptedError from None
        except BaseException:
            process.kill()
            raise
    if status != 0:
        raise TrainingError(f"training ended with status {status}; the end of {log}:\n{''.join(last_lines)}")


def describe(line: str) -> str | None:
    """Format a line of the training log as progress; return None for lines that are not shown."""
    parsed = parse_line(line)
    if isinstance(parsed, IterationLine):
        done = round(BAR_WIDTH * parsed.iteration / parsed.last_iteration)
        rate = parsed.tokens_per_second_per_device
        return (
            f"[{'=' * done}{' ' * (BAR_WIDTH - done)}] iteration {parsed.iteration}/{parsed.last_iteration}  "
            f"loss {parsed.loss:.3f}  {'' if rate is None else f'{rate:,.0f} tokens/s per rank  '}"
            f"{_minutes(parsed.seconds_left)} left"
        )
    if isinstance(parsed, ValidationLine):
        return f"{' ' * (BAR_WIDTH + 2)} validation loss {parsed.loss:.3f}"
    if line.startswith(" loaded ") or "successfully saved checkpoint" in line:
        return f"{' ' * (BAR_WIDTH + 2)} {line.strip()}"
    return None


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _end(process: subprocess.Popen[str], log: TextIO) -> None:
    """Send SIGTERM, on which the ranks save and end; kill them on a second interrupt."""
    process.send_signal(signal.SIGTERM)
    try:
        assert process.stdout is not None
        log.writelines(process.stdout)
        process.wait()
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def _interrupts_raise() -> Iterator[None]:
    """Make SIGTERM and SIGHUP act like Ctrl-C within the scope, so that a closed terminal leaves no ranks behind."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
