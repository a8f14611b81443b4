"""A ``python`` that starts at once: each is forked from a server that has imported torch and this repository.

An interpreter that imports torch takes three seconds of a core, and tests of commands start dozens. ``warm_python()`` is
the path of a program that takes the arguments of ``python``. It asks the server for a process with its own arguments,
folder, environment and streams, passes signals on, and ends as that process ends. To the process ``sys.executable`` is that
program, so what it starts is warm too. Its own parent is the server: ``WARM_PARENT`` in its environment is who started it.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import json
import multiprocessing.process
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import tokenize
import types
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

_ROOT = Path(__file__).parents[2]
# A process of multiprocessing inherits more than the three streams, so it is one of the server's Python.
_PRELOAD = (
    "multiprocessing.spawn",
    "torch.distributed.run",
    "torch.distributed.checkpoint",
    "torch.utils.data",
    "pretrain_gpt",
    "tests.support.frozen_imports",
)
_OF_ALL_WORKERS = "WARM_PYTHON"
_UNTIL_READY = ".new"
_START_S = 300
_PR_SET_CHILD_SUBREAPER = 36
_GONE_S = 0.02
"""Seconds between two looks at what an ended process has left in its session."""

# The other options of Python, and its warnings, need an interpreter of their own.
_CLIENT = """#!{python} -IS
import json, os, signal, socket, sys

arguments = sys.argv[1:]
while arguments[:1] == ["-u"]:
    os.environ["PYTHONUNBUFFERED"] = "1"
    del arguments[0]
if not arguments or arguments[0][0] == "-" and arguments[0] not in ("-m", "-c") or "PYTHONWARNINGS" in os.environ:
    os.execv("{python}", ["{python}", *arguments])
request = dict(arguments=arguments, folder=os.getcwd(), environment={{**os.environ, "WARM_PARENT": str(os.getppid())}})
signals = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect("{address}")
socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
pid = int(server.recv(100))
with open("{program}." + str(os.getpid()), "w") as file:
    file.write(str(pid))
for number in signals:
    signal.signal(number, lambda number, _: os.kill(pid, number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
for descriptor in (0, 1, 2):
    os.close(descriptor)
status = int(server.recv(100) or -signal.SIGKILL)
if status < 0:
    if status != -signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


@functools.cache
def warm_python() -> str:
    """Return the program's path; its server lives as long as the process that started it."""
    program = os.environ.get(_OF_ALL_WORKERS) or start_server()
    deadline = time.monotonic() + _START_S
    while not os.path.exists(program):
        assert all(server.poll() is None for server in _kept), "the server ended before it was ready"
        assert time.monotonic() < deadline, f"the server was not ready after {_START_S} s"
        time.sleep(0.02)
    return program


def share_among_workers() -> None:
    """Start the server of this process and of those that it starts. It imports for seconds, for which nobody waits here."""
    os.environ[_OF_ALL_WORKERS] = start_server()


def start_server() -> str:
    """Start a server, and return the path of the program, which will be there when the server is ready."""
    folder = tempfile.mkdtemp(prefix="warm-python-")
    address, program = f"{folder}/socket", Path(folder, "python")
    written = program.with_suffix(_UNTIL_READY)
    written.write_text(_CLIENT.format(python=sys.executable, address=address, program=program))
    written.chmod(0o700)
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.support.warm_python", address, str(program)],
        cwd=_ROOT,
        env=os.environ | {"PYTHONPATH": str(_ROOT)},
        stdin=subprocess.PIPE,  # at whose end it ends
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    _kept.append(server)
    return str(program)


def pid_of(program: subprocess.Popen[str]) -> int:
    """Return the pid by which a process that ``warm_python()`` runs knows itself."""
    return int(Path(f"{warm_python()}.{program.pid}").read_text())


_kept: list[subprocess.Popen[bytes]] = []


class _Process(NamedTuple):
    """A process that runs, and the connection to the program that asked for it."""

    descriptor: int
    connection: socket.socket


def _serve(address: str, program: str) -> dict[str, Any]:
    """Fork for each request, and return it in the new process; the server itself ends with its standard input.

    With it goes its folder: the process that started it may end without a farewell, as workers of pytest-xdist do.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(64)
    Path(program).with_suffix(_UNTIL_READY).rename(program)
    processes: dict[int, _Process] = {}
    ended: dict[int, int] = {}  # statuses of those that may have left others in their sessions
    while True:
        descriptors = [process.descriptor for pid, process in processes.items() if pid not in ended]
        clients = {process.connection.fileno(): pid for pid, process in processes.items() if pid not in ended}
        sources: list[Any] = [0, listener, *descriptors, *clients]
        ready, _, _ = select.select(sources, [], [], _GONE_S if ended else None)
        if 0 in ready:
            shutil.rmtree(Path(address).parent)
            sys.exit(0)
        for client in clients.keys() & set(ready):  # it was killed
            with suppress(ProcessLookupError):
                os.kill(clients[client], signal.SIGKILL)
        ended.update({pid: status for pid, status in _reaped() if pid in processes})
        for pid in [pid for pid in ended if not _has_processes(pid)]:
            process = processes.pop(pid)
            _send(process.connection, ended.pop(pid))
            process.connection.close()
            os.close(process.descriptor)
        if listener in ready:
            connection, _ = listener.accept()
            text, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
            pid = os.fork()
            if pid == 0:
                os.setsid()
                for inherited in (listener, connection, *(process.connection for process in processes.values())):
                    inherited.close()
                for process in processes.values():
                    os.close(process.descriptor)
                for stream, descriptor in enumerate(streams):
                    os.dup2(descriptor, stream)
                    os.close(descriptor)
                request: dict[str, Any] = json.loads(text)
                return request
            for descriptor in streams:
                os.close(descriptor)
            processes[pid] = _Process(os.pidfd_open(pid), connection)
            _send(connection, pid)


def _reaped() -> Iterator[tuple[int, int]]:
    """Yield the processes that have ended, orphans too, and their exit statuses."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended[0], os.waitstatus_to_exitcode(ended[1])


def _has_processes(session: int) -> bool:
    try:
        os.killpg(session, 0)
    except ProcessLookupError:
        return False
    return True


def _send(connection: socket.socket, number: int) -> None:
    with suppress(OSError):
        connection.send(str(number).encode())


def _become(request: dict[str, Any], program: str, path: list[str]) -> None:
    """Run what Python was to run with these arguments."""
    os.environ.clear()
    os.environ.update(request["environment"])
    time.tzset()
    os.chdir(request["folder"])
    vars(multiprocessing.process)["ORIGINAL_DIR"] = request["folder"]  # where paths of scripts begin
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering="PYTHONUNBUFFERED" in os.environ)
    sys.executable = program
    first, *rest = request["arguments"]
    sys.path[:] = [*os.environ.get("PYTHONPATH", "").split(os.pathsep), *path]
    if first == "-m":
        sys.argv, sys.path[:0] = rest, [request["folder"]]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    program_module = types.ModuleType("__main__")
    sys.modules["__main__"] = sys.modules["__mp_main__"] = program_module  # what processes of multiprocessing call it
    if first == "-c":
        sys.argv, sys.path[:0], source, name = ["-c", *rest[1:]], [""], rest[0], "<string>"
    else:
        sys.argv, sys.path[:0], source, name = [first, *rest], [str(Path(first).resolve().parent)], _read(first), first
        program_module.__file__ = first
    exec(compile(source, name, "exec", dont_inherit=True), program_module.__dict__)


def _read(script: str) -> str:
    try:
        with tokenize.open(script) as file:
            return file.read()
    except OSError as error:
        print(f"{sys.executable}: can't open file {script!r}: {error}", file=sys.stderr)
        sys.exit(2)


def _end(error: BaseException | None) -> NoReturn:
    """End as Python does after its program, but for the two seconds in which it frees what the server has imported."""
    status: Any = 0
    if isinstance(error, SystemExit):
        status = error.code
    elif error is not None:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    if not isinstance(status, int | None):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status or 0)


def main(address: str, program: str) -> None:
    path = [folder for folder in sys.path if folder not in ("", str(_ROOT))]
    for name in _PRELOAD:
        importlib.import_module(name)
    mock: Any = importlib.import_module("megatron.core.datasets.mock_corpus").MockGPTLowLevelDataset
    mock.size = 10_000  # the index of its 100,000 documents would take each rank a second
    request = _serve(address, program)
    try:
        _become(request, program, path)
    except BaseException as error:
        _end(error)
    _end(None)


if __name__ == "__main__":
    main(*sys.argv[1:])
