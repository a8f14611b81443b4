"""A Slurm cluster on this machine: two nodes that are two names of it, for tests of job scripts."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "srun", "unshare")
_NUM_GPUS = 8

_CONFIGURATION = """
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobRequeue=1
ReturnToService=2
KillWait=120
SchedulerParameters=sched_min_interval=1
SlurmdParameters=config_overrides
GresTypes=gpu
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing_for_slurm() -> str | None:
    """Return why there can be no cluster here; None: there can."""
    if os.geteuid() != 0:
        return "a Slurm cluster of two nodes on one machine needs root, for their two host names"
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    missing = [name for name in _PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        return f"needs Slurm, got no {', '.join(missing)}: install slurmctld, slurmd, slurm-client and munge"
    return None


class LocalSlurm:
    """A running cluster of two nodes with 64 cores and 8 GPUs each, of which none is real.

    Args:
        folder: of its files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
        }

    def run(self, *command: str, check: bool = True, settings: Mapping[str, str] | None = None) -> str:
        """Run a command of Slurm, with these environment variables too, and return what it prints."""
        done = subprocess.run(
            command,
            env={**self.environment, **(settings or {})},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        if check and done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} must succeed, got status {done.returncode}: {done.stderr}")
        return f"{done.stdout}{done.stderr}"

    def start(self) -> None:
        """Start the daemons, and wait until both nodes take jobs."""
        for name in ("munge", "state"):
            (self.folder / name).mkdir()
        (self.folder / "munge").chmod(0o755)
        key = self.folder / "munge/key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        host = socket.gethostname().split(".")[0]
        names = (host, f"{host}-b")
        ports = [_free_port() for _ in range(3)]
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={port} CPUs=64 Gres=gpu:{_NUM_GPUS} State=UNKNOWN"
            for name, port in zip(names, ports, strict=False)
        )
        (self.folder / "slurm.conf").write_text(
            _CONFIGURATION.format(host=host, controller_port=ports[2], folder=self.folder, nodes=nodes)
        )
        for number in range(_NUM_GPUS):
            (self.folder / f"gpu{number}").touch()
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-{_NUM_GPUS - 1}]\n")
        (self.folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
        munge = self.folder / "munge"
        files = [f"--{what}={munge / what.split('-')[0]}" for what in ("socket", "pid-file", "log-file", "seed-file")]
        self.run("munged", "--force", f"--key-file={key}", *files)
        self.run("slurmctld", "-c")
        # Each node has a host name of its own.
        for name in names:
            self.run("unshare", "--uts", "bash", "-c", f"hostname {name} && exec slurmd -N {name}")
        self.wait_until(lambda: "idle" in (states := self.run("sinfo", "-h", "-o", "%T %D")) and "2" in states, 60)

    def wait_until(self, condition: object, seconds: float) -> None:
        """Wait until a function returns something true."""
        assert callable(condition)
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                logs = "\n".join(f"{log}:\n{log.read_text()[-1500:]}" for log in self.folder.glob("slurm*.log"))
                raise TimeoutError(f"waited {seconds:.0f} s; {self.run('squeue', check=False)}\n{logs}")
            time.sleep(0.5)

    def stop(self) -> None:
        """End the jobs and the daemons."""
        with suppress(RuntimeError):
            self.run("scancel", "--state=RUNNING")
            self.run("scancel", "--state=PENDING")
        files = [*self.folder.glob("slurmd.*.pid"), self.folder / "slurmctld.pid", self.folder / "munge/pid"]
        for file in files:
            with suppress(OSError, ValueError):
                os.kill(int(file.read_text()), 15)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def local_slurm(folder: Path) -> Iterator[LocalSlurm]:
    """Run a cluster within the scope; skip the test where there can be none."""
    if (reason := missing_for_slurm()) is not None:
        pytest.skip(reason)
    cluster = LocalSlurm(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
