"""A drill of losing a host during training, on one machine: two network namespaces act as hosts, and their link is cut.

    sudo python examples/multi_node/drill.py

1. Trains without a disturbance, through ``train.sh`` on both hosts.
2. Trains again and takes the link down during training. The first host must end within the time-out and name the ranks that
   it waited for.
3. Brings the link back and starts both hosts again. Training must continue from the last checkpoint, and every loss of both
   runs must be that of the undisturbed run.

It takes about 3 minutes on CPUs. It needs root for the namespaces. With ``--stop-processes`` it does not: both hosts are this
machine, and instead of cutting a link it stops the processes of the second one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

# Works without an installed package too.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.training_log import read_losses

TRAIN = Path(__file__).resolve().parent / "train.sh"

MODEL_FLAGS = """
--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
--micro-batch-size 2 --global-batch-size 8 --lr 1e-2 --mock-data --tokenizer-type NullTokenizer --vocab-size 99
--log-interval 1 --eval-iters 0 --num-workers 0 --distributed-backend gloo
"""

TIMEOUT_S = 60.0
"""Communication time-out of the ranks; the flag takes whole minutes."""

SLACK_S = 30.0
"""Time beyond it to find the silent ranks and end the processes; more if the undisturbed run was slow to start."""


class DrillError(Exception):
    """The drill failed; the message has the end of the logs."""


@dataclass
class Host:
    """One of the two hosts: a network namespace, or this machine."""

    name: str
    address: str
    namespace: str | None = None
    interface: str = "lo"
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return the command that runs ``arguments`` on this host, under its own host name."""
        if self.namespace is None:
            return list(arguments)
        rename = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name]
        return ["ip", "netns", "exec", self.namespace, *rename, *arguments]

    def start(self, arguments: Sequence[str], *, environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Start ``arguments`` on this host; append the output to ``log``."""
        with log.open("ab") as file:
            process = subprocess.Popen(
                self.command(arguments),
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment, "GLOO_SOCKET_IFNAME": self.interface},
            )
        self.processes.append(process)
        return process

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all running processes that were started here, and to their children."""
        for process in self.processes:
            if process.poll() is None:
                for pid in _tree(process.pid):
                    with suppress(ProcessLookupError):
                        os.kill(pid, number)


class Cable:
    """Two hosts in network namespaces, with one link between them."""

    def __init__(self) -> None:
        mark = f"{os.getpid() % 10000}"
        self.hosts = [
            Host(f"drill-{name}", f"10.213.0.{number}", f"drill{mark}{name}", f"veth{mark}{name}")
            for number, name in ((1, "a"), (2, "b"))
        ]

    def __enter__(self) -> Cable:
        first, second = self.hosts
        for host in self.hosts:
            _ip("netns", "add", str(host.namespace))
        _ip("link", "add", first.interface, "type", "veth", "peer", "name", second.interface)
        for host in self.hosts:
            _ip("link", "set", host.interface, "netns", str(host.namespace))
            inside = ("-n", str(host.namespace))
            _ip(*inside, "addr", "add", f"{host.address}/24", "dev", host.interface)
            _ip(*inside, "link", "set", "lo", "up")
            _ip(*inside, "link", "set", host.interface, "up")
        return self

    def cut(self) -> None:
        """Take the link down; the hosts get no notice."""
        self._set("down")

    def mend(self) -> None:
        """Bring the link up again."""
        self._set("up")

    def _set(self, state: str) -> None:
        host = self.hosts[1]
        _ip("-n", str(host.namespace), "link", "set", host.interface, state)

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            host.signal(signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", str(host.namespace)], check=False)


class StoppedProcesses:
    """Two hosts that are both this machine; the second is lost by stopping its processes."""

    def __init__(self) -> None:
        self.hosts = [Host("localhost (first)", "127.0.0.1"), Host("localhost (second)", "127.0.0.1")]

    def __enter__(self) -> StoppedProcesses:
        return self

    def cut(self) -> None:
        """Stop the processes of the second host; their connections stay open."""
        self.hosts[1].signal(signal.SIGSTOP)

    def mend(self) -> None:
        """Kill the stopped processes."""
        self.hosts[1].signal(signal.SIGKILL)

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            host.signal(signal.SIGKILL)


class Drill:
    """The drill on two hosts, with all files in one folder.

    Args:
        cut_after: iteration after whose log line the second host is lost.
    """

    def __init__(
        self,
        network: Cable | StoppedProcesses,
        folder: Path,
        *,
        ranks_per_host: int,
        iterations: int,
        cut_after: int,
        settings: Mapping[str, str],
    ) -> None:
        self.network, self.folder, self.ranks_per_host = network, folder, ranks_per_host
        self.iterations, self.cut_after, self.settings = iterations, cut_after, settings
        self.port = _free_port()
        self.slack_s = SLACK_S

    def run(self) -> None:
        """Run all three parts.

        Raises:
            DrillError: one of them failed.
        """
        say(f"1. an undisturbed run: 2 hosts x {self.ranks_per_host} ranks, {self.iterations} iterations")
        whole = self.losses_of(self.finish("whole"))
        say(f"2. the same, and the second host is lost after iteration {self.cut_after}")
        before = self.losses_of(self.lose_a_host("cut"))
        say("3. both hosts again, from the last checkpoint")
        after = self.losses_of(self.finish("cut"))
        for losses in (before, after):
            wrong = {i: (loss, whole.get(i)) for i, loss in losses.items() if loss != whole.get(i)}
            self.check(not wrong, f"losses must be those of the undisturbed run, got {dict(list(wrong.items())[:5])}")
        self.check(1 < min(after) <= max(before) + 1, f"training must continue near {max(before)}, got {min(after)}")
        say(
            f"   iterations 1 to {max(before)} before the loss and {min(after)} to {max(after)} after it have the losses of"
            " the undisturbed run, digit for digit"
        )

    def start(self, name: str) -> tuple[Path, list[subprocess.Popen[bytes]]]:
        """Start training on both hosts in the folder ``name``; return the log of the first and both processes."""
        attempt = len(list(self.folder.glob(f"{name}-*-0.log")))
        self.port += 1  # connections of a lost run may keep the last port for a while
        flags = [*MODEL_FLAGS.split(), "--train-iters", str(self.iterations)]
        logs, processes = [], []
        for number, host in enumerate(self.network.hosts):
            environment = {
                "NNODES": "2",
                "NODE_RANK": str(number),
                "MASTER_ADDR": self.network.hosts[0].address,
                "MASTER_PORT": str(self.port),
                "RUN": str(self.folder / name),
                "RANKS_PER_NODE": str(self.ranks_per_host),
                "SAVE_INTERVAL": str(max(1, self.cut_after // 2)),
                "TIMEOUT_MINUTES": str(int(TIMEOUT_S // 60)),
                "PYTHON": sys.executable,
                "CUDA_VISIBLE_DEVICES": "",
                **self.settings,
            }
            logs.append(self.folder / f"{name}-{attempt}-{number}.log")
            processes.append(host.start(["bash", str(TRAIN), *flags], environment=environment, log=logs[-1]))
        return logs[0], processes

    def finish(self, name: str) -> Path:
        """Train to the end on both hosts; return the log of the first."""
        start = time.monotonic()
        log, processes = self.start(name)
        while not self.losses_of(log) and all(process.poll() is None for process in processes):
            time.sleep(0.1)
        # On a busy machine the ranks take as long to end as to start.
        self.slack_s = max(self.slack_s, time.monotonic() - start)
        for process in processes:
            status = process.wait()
            self.check(status == 0, f"both hosts must end without error, got status {status}")
        return log

    def lose_a_host(self, name: str) -> Path:
        """Train and lose the second host; check that the first ends in time and names its ranks; return the log."""
        log, (first, second) = self.start(name)
        while self.cut_after not in self.losses_of(log):
            self.check(first.poll() is None, "training must run before a host is lost")
            time.sleep(0.1)
        self.network.cut()
        start = time.monotonic()
        status = self.wait(first, TIMEOUT_S + self.slack_s)
        seconds = time.monotonic() - start
        self.check(status not in (0, None), f"the first host must end with an error, got status {status}")
        text = log.read_text(errors="replace")
        lost = [self.ranks_per_host + rank for rank in range(self.ranks_per_host)]
        named = [line for line in text.splitlines() if "no sign of life within" in line]
        self.check(bool(named), "the first host must name the ranks that it waited for")
        for rank in lost:
            self.check(f"rank {rank} (host " in named[0], f"rank {rank} must be named, got: {named[0]}")
        say(
            f"   the first host ended after {seconds:.0f} s (time-out {TIMEOUT_S:.0f} s) and said:\n   {named[0].strip()}"
        )
        self.network.mend()
        self.network.hosts[1].signal(signal.SIGKILL)  # processes that their own time-out has not ended
        self.wait(second, self.slack_s)
        return log

    def losses_of(self, log: Path) -> dict[int, float]:
        """Return the losses by iteration in a log, as far as it is written."""
        return read_losses(log.read_text(errors="replace").splitlines()).train if log.exists() else {}

    def wait(self, process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
        """Wait for a process and return its status; None if it does not end in this time."""
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def check(self, holds: bool, message: str) -> None:
        """Raise ``DrillError`` with the ends of the last logs unless the condition holds."""
        if not holds:
            logs = sorted(self.folder.glob("*.log"), key=lambda log: log.stat().st_mtime)[-2:]
            ends = [f"--- {log}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-25:]) for log in logs]
            raise DrillError("\n".join([message, *ends]))


def say(text: str) -> None:
    """Print without buffering, since the user watches."""
    print(text, flush=True)


def missing_for_namespaces() -> str | None:
    """Return why this process cannot make network namespaces; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root: run this with sudo, or with --stop-processes"
    for program in ("ip", "unshare"):
        if shutil.which(program) is None:
            return f"{program} is missing (packages iproute2 and util-linux); install it, or use --stop-processes"
    made = subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True, text=True)
    if made.returncode != 0:
        return f"this machine does not allow namespaces ({made.stderr.strip()}); use --stop-processes"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the drill; return the exit status, 0 if it succeeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks-per-host", type=int, default=2, help="gloo ranks of each host (default: 2)")
    parser.add_argument("--iterations", type=int, default=300, help="iterations of the whole run (default: 300)")
    parser.add_argument(
        "--cut-after", type=int, default=100, help="iteration after which the host is lost (default: 100)"
    )
    parser.add_argument("--stop-processes", action="store_true", help="no namespaces: stop the second host's processes")
    parser.add_argument(
        "--sharding", default="optim_grads_params", help="sharding within a host (default: optim_grads_params)"
    )
    parser.add_argument(
        "--outer-sharding",
        choices=["no_shard", "optim", "all"],
        default="no_shard",
        help="sharding over hosts, see train.sh",
    )
    parser.add_argument("--folder", type=Path, help="keep logs and checkpoints here (default: a temporary folder)")
    chosen = parser.parse_args(arguments)
    if not chosen.stop_processes and (reason := missing_for_namespaces()) is not None:
        print(f"drill.py: {reason}", file=sys.stderr)
        return 2
    # SIGTERM raises, so that namespaces and ranks are cleaned up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with _folder(chosen.folder) as folder, StoppedProcesses() if chosen.stop_processes else Cable() as network:
            Drill(
                network,
                folder,
                ranks_per_host=chosen.ranks_per_host,
                iterations=chosen.iterations,
                cut_after=chosen.cut_after,
                settings={"SHARDING": chosen.sharding, "OUTER_SHARDING": chosen.outer_sharding},
            ).run()
    except DrillError as error:
        print(f"drill.py: {error}", file=sys.stderr)
        return 1
    return 0


@contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="drill") as made:
        yield Path(made)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise DrillError(f"ip {' '.join(arguments)} must succeed, got: {done.stderr.strip()}")


def _tree(root: int) -> list[int]:
    """List the ids of a process and its descendants, the root first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(FileNotFoundError, PermissionError, ProcessLookupError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [root]
    for pid in found:
        found.extend(children.get(pid, []))
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
