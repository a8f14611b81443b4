"""A lock on a run's folder: one run at a time saves there, and the lock says which.

The lock is a small file in the folder. It appears in one step with the name of its owner: host, process, time of start.
Whether that owner still lives is found out in one of three ways:

- An earlier start of the same job is over: torchrun ends it before it starts the next.
- A process of this machine is asked for by its number and its time of start.
- A process elsewhere cannot be asked. It touches the file every ``BEAT_S`` seconds; ``LOST_S`` without that, by the clock of
  the file system, and it is taken for lost. Whoever wants the folder waits so long at most.

A process that was taken for lost may only have been stopped. So an owner looks at the lock again before each save.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, Thread

from megatron.core.regular_file import open_regular, parse_json, read_regular

LOCK = ".run-lock"
BEAT_S = 5.0
LOST_S = 30.0
"""Less than the shortest time-out of communication, a minute, in which the other ranks wait."""

_POLL_S = 0.25
_MOST_NBYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The process that has a lock."""

    token: str = ""
    """A name that no other lock has; empty where the file does not hold an owner."""

    host: str = ""
    machine: str = ""
    """What processes have in common that can ask for each other by number."""

    pid: int = 0
    process_start: str = ""
    """Clock ticks from the start of the machine to that of the process; another process of this number has another."""

    since: str = ""

    def __str__(self) -> str:
        if not self.token:
            return "an unknown process (the file is not readable)"
        return f"process {self.pid} on host {self.host} (since {self.since})"


class FolderLock:
    """The lock on a folder, held by this process until ``release``.

    Args:
        path: the file of the lock.
        owner: this process, as it stands there.
        descriptor: of the file; the signs of life go to this very file, also after another process has replaced it.
    """

    def __init__(self, path: Path, owner: Owner, descriptor: int) -> None:
        self.path, self.owner, self._descriptor = path, owner, descriptor
        self._released = Event()
        self._beats = Thread(target=self._beat, name="lock of --save", daemon=True)
        self._beats.start()

    @classmethod
    def acquire(cls, folder: Path, *, earlier: str = "", say: Callable[[str], None] = print) -> FolderLock:
        """Lock the folder for this process.

        Args:
            folder: an existing folder.
            earlier: token of the lock of an earlier start of this job.
            say: is called with a line about a wait, and about a lock that was taken over.

        Raises:
            FileExistsError: another run has the folder; names its process.
            OSError: the file cannot be written.

        Ranks: one; waits up to ``LOST_S`` for a sign of life of a process on another machine.
        Source: ours.
        """
        path, owner = folder / LOCK, _this_process()
        temporary = folder / f"{LOCK}-{owner.token}"
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            content = json.dumps(asdict(owner)).encode()
            if os.write(descriptor, content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(temporary))
            while not _put(temporary, path):
                holder = read_owner(path)
                if holder is None:
                    continue
                reason = _lost(path, holder, descriptor, earlier, say)
                if reason is None:
                    raise FileExistsError(_in_use(folder, holder))
                if read_owner(path) != holder:
                    continue  # somebody else took it over
                os.replace(temporary, path)
                say(f" --save {folder}: the lock of {holder} is taken over, since {reason}")
                break
            lock = cls(path, owner, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        finally:
            temporary.unlink(missing_ok=True)
        try:
            lock.check()
        except OSError:
            lock.release()
            raise
        return lock

    def check(self) -> None:
        """Check that the folder is still this process's.

        Raises:
            FileExistsError: another run has taken it over.
            OSError: the lock is gone, or cannot be read.

        Ranks: the one that has it.
        """
        holder = read_owner(self.path)
        if holder is None:
            raise OSError(
                f"--save {self.path.parent} must keep its {LOCK} while a run saves there, got a folder without it; "
                "something else removes files there: give each run a folder of its own"
            )
        if holder.token != self.owner.token:
            raise FileExistsError(_in_use(self.path.parent, holder))

    def release(self) -> None:
        """Remove the lock, if it is still this process's."""
        if self._released.is_set():
            return
        self._released.set()
        self._beats.join()
        os.close(self._descriptor)
        with contextlib.suppress(OSError):
            holder = read_owner(self.path)
            if holder is not None and holder.token == self.owner.token:
                self.path.unlink()

    def _beat(self) -> None:
        while not self._released.wait(BEAT_S):
            with contextlib.suppress(OSError):  # replaced or removed: ``check`` says so
                os.utime(self._descriptor)


def read_owner(path: Path) -> Owner | None:
    """Return the owner that a lock names; None if there is no lock.

    Raises:
        FileExistsError: something that cannot be a lock has its name, such as a folder or a named pipe.
    """
    try:
        text = read_regular(path, _MOST_NBYTES)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise FileExistsError(f"--save {path.parent} is locked by what is no lock of a run: {error}") from error
    try:
        values = parse_json(text)
        owner = Owner(**{name: type(getattr(Owner(), name))(values[name]) for name in asdict(Owner())})
    except (KeyError, TypeError, ValueError, OverflowError):
        return Owner()
    return owner


def _put(temporary: Path, path: Path) -> bool:
    """Give the file its second name in one step, unless something has it; return whether it did."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError:  # no hard links on this file system
        if path.exists():
            return False
        # Of two that come here at once, the second one is told by ``check``, or the first one before its first save.
        os.replace(temporary, path)
    return True


def _lost(path: Path, holder: Owner, descriptor: int, earlier: str, say: Callable[[str], None]) -> str | None:
    """Return why the lock's owner is over, or None if it lives; waits for a sign of life of one that cannot be asked."""
    if earlier and holder.token == earlier:
        return "it belongs to an earlier start of this job"
    if holder.token and holder.machine == _machine():
        return None if _lives(holder) else "that process has ended"
    first, begin, told = _age(path, descriptor), time.monotonic(), False
    while first is not None:
        now = _age(path, descriptor)
        if now is None or now[0] != first[0]:
            return None  # a sign of life, or another lock
        if now[1] >= LOST_S or time.monotonic() - begin >= LOST_S:
            return f"it has given no sign of life for {LOST_S:.0f} s (its process cannot be asked from here)"
        if not told:
            say(
                f" --save {path.parent} is locked by {holder}, whose last sign of life is {now[1]:.0f} s old: waiting for "
                f"the next one, or until it is {LOST_S:.0f} s old"
            )
            told = True
        time.sleep(_POLL_S)
    return None


def _age(path: Path, descriptor: int) -> tuple[tuple[int, int], float] | None:
    """Return what changes with each sign of life of the lock, and its age by the file system's clock; None without lock."""
    try:
        # Opened, since network file systems answer a mere stat from a cache.
        with open_regular(path) as file:
            state = os.fstat(file.fileno())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise FileExistsError(f"--save {path.parent} is locked by what is no lock of a run: {error}") from error
    os.utime(descriptor)
    now = os.fstat(descriptor).st_mtime_ns
    return (state.st_ino, state.st_mtime_ns), (now - state.st_mtime_ns) / 1e9


def _in_use(folder: Path, holder: Owner) -> str:
    return (
        f"--save {folder} must be the folder of one run at a time, got one that is in use by {holder}; end that run, or "
        "give another folder"
    )


def _this_process() -> Owner:
    pid = os.getpid()
    return Owner(
        token=secrets.token_hex(6),
        host=socket.gethostname(),
        machine=_machine(),
        pid=pid,
        process_start=_start_of(pid) or "",
        since=time.strftime("%Y-%m-%d %H:%M:%S %z"),
    )


def _machine() -> str:
    """Describe the space of process numbers: the host, its boot, and the container."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _lives(owner: Owner) -> bool:
    try:
        os.kill(owner.pid, 0)
    except (ProcessLookupError, OverflowError):  # no process has, or can have, this number
        return False
    except PermissionError:  # another user's, whose start may be hidden
        return _start_of(owner.pid) in (None, owner.process_start)
    return _start_of(owner.pid) == (owner.process_start or None)


def _start_of(pid: int) -> str | None:
    """Return when a process started; None if it has ended, or where the system does not say."""
    try:
        # "pid (name) state ...": the name may hold anything. States Z and X: ended.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
