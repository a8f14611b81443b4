"""Hybrid sharding across hosts with a slow network: how much of the outer reduction's time does backward hide?

    sudo python -m benchmarks.slow_network --hosts 2 --ranks-per-host 2 --rate-mbit 200

Hosts are network namespaces of this machine, joined by a bridge, and ``tc`` limits what each of them sends. Ranks are on the CPU, where
the engine has no streams; here its reduce stream is a thread (``measure/thread_streams.py``), so reductions run beside backward as they do on
GPUs, and the time that compute waits for them is measured. HSDP reduces gradients over the hosts, HFSDP shards the optimizer state over them too,
so that each host gets the sums of its part alone (and gathers weights after the update, which no thread hides here).

Prints a line for each sharding and rate, and JSON with ``--json FILE``. Wire is the least time that the bytes need at the rate; exposed the time
that compute waited for reductions. Losses must be those of the same model without sharding.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.measure.thread_streams import thread_streams
from megatron.core.distributed.fsdp import fully_shard, hybrid_placements

SHARDINGS = {"HSDP": "no_shard", "HFSDP": "optim"}
NUM_LAYERS = 8
WIDTH = 512
_TOKENS = 1024
_STEPS = 4
_INTERFACE = "host"
_PORT = 29517


def missing_for_hosts() -> str | None:
    """Return why hosts cannot be made here; None: they can."""
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"needs {' and '.join(missing)} of iproute2, got none"
    if os.geteuid() != 0:
        return "network namespaces need root"
    done = subprocess.run(["ip", "netns", "add", "probe-of-hosts"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return f"network namespaces cannot be made: {done.stderr.strip()}"
    _ip("netns", "delete", "probe-of-hosts")
    return None


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(words)} must succeed, got: {done.stderr.strip()}")


@contextmanager
def hosts(number: int) -> Iterator[list[str]]:
    """Make namespaces with an interface each, addresses 10.214.0.1 and so on, joined by a bridge; return their names."""
    mark = f"{os.getpid() % 10000}"
    files = Path("/etc/netns")
    names, bridge = [f"slow{mark}-{host}" for host in range(number)], f"br{mark}"
    try:
        _ip("netns", "add", f"switch{mark}")
        inside = ("-n", f"switch{mark}")
        _ip(*inside, "link", "add", bridge, "type", "bridge")
        _ip(*inside, "link", "set", bridge, "up")
        known = "".join(f"{_address(host)} {name}\n" for host, name in enumerate(names))
        for host, name in enumerate(names):
            _ip("netns", "add", name)
            # Names are looked up in this file alone: no server of names can be reached, and each question would wait for one.
            (files / name).mkdir(parents=True)
            (files / name / "hosts").write_text(f"127.0.0.1 localhost {socket.gethostname()}\n{known}")
            (files / name / "nsswitch.conf").write_text("hosts: files\n")
            _ip(
                "link", "add", _INTERFACE, "netns", name, "type", "veth", "peer", "name", f"p{host}", "netns", inside[1]
            )
            _ip(*inside, "link", "set", f"p{host}", "master", bridge, "up")
            _ip("-n", name, "addr", "add", f"{_address(host)}/24", "dev", _INTERFACE)
            for interface in ("lo", _INTERFACE):
                _ip("-n", name, "link", "set", interface, "up")
        yield names
    finally:
        for name in (*names, f"switch{mark}"):
            with suppress(RuntimeError):
                _ip("netns", "delete", name)
            shutil.rmtree(files / name, ignore_errors=True)
        with suppress(OSError):
            files.rmdir()


def _address(host: int) -> str:
    return f"10.214.0.{host + 1}"


def limit(rate_mbit: float | None) -> None:
    """Limit what this host sends to others; None: not. Ranks: the first of each host."""
    if rate_mbit is None:
        subprocess.run(["tc", "qdisc", "delete", "dev", _INTERFACE, "root"], capture_output=True, check=False)
        return
    words = f"qdisc replace dev {_INTERFACE} root tbf rate {rate_mbit}mbit burst 256kb latency 500ms"
    subprocess.run(["tc", *words.split()], check=True)


class Mlp(nn.Module):
    """[tokens, width] -> [tokens, width], of equal layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def _loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(_TOKENS, WIDTH, generator=generator)
    return (model(x) - x.roll(1, dims=1)).square().mean()


def unsharded_losses(world_size: int) -> list[float]:
    """Train without sharding on the data of all ranks; return the mean loss of each step."""
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(_STEPS):
        total = 0.0
        for rank in range(world_size):
            loss = _loss(model, step, rank) / world_size
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def train(sharding: str, num_hosts: int, rate_mbit: float | None) -> dict[str, Any]:
    """Train a few steps and return what they took: medians over steps of the longest rank, in ms."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ranks_per_host = world_size // num_hosts
    mesh = init_device_mesh("cpu", (num_hosts, ranks_per_host), mesh_dim_names=("outer", "inner"))
    placements = hybrid_placements("optim_grads_params", SHARDINGS[sharding], ("outer", "inner"))
    # Gathers of their own communicators, since they run beside reductions, on no rank in the same order.
    gathers = [dist.new_group(range(at, at + ranks_per_host)) for at in range(0, world_size, ranks_per_host)]
    if rank % ranks_per_host == 0:
        limit(rate_mbit)
    with thread_streams(lambda ranks: ranks[-1] - ranks[0] >= ranks_per_host) as streams:
        model = Mlp()
        for module in (*model.layers, model):
            fully_shard(module, mesh, placements=placements, fsdp_group_ag=gathers[rank // ranks_per_host])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        rows, losses = [], []
        for step in range(_STEPS):
            dist.barrier()
            before, began = vars(streams.times).copy(), time.perf_counter()
            loss = _loss(model, step, rank)
            loss.backward()
            backward_s = time.perf_counter() - began
            optimizer.step()
            optimizer.zero_grad()
            spent = {name: value - before[name] for name, value in vars(streams.times).items()}
            row = torch.tensor(
                [backward_s, spent["waited_s"], spent["outer_s"], spent["outer_nbytes"]], dtype=torch.float64
            )
            dist.all_reduce(row, op=dist.ReduceOp.MAX)
            rows.append(row.tolist())
            mean = loss.detach() / world_size
            dist.all_reduce(mean)
            losses.append(mean.item())
    limit(None)
    backward, exposed, outer, nbytes = (median(column) for column in zip(*rows[1:], strict=True))
    # A ring sends a sum twice, but for one part of as many as there are hosts; ranks that each get their own part send it once.
    sent = (2 if SHARDINGS[sharding] == "no_shard" else 1) * (num_hosts - 1) / num_hosts * nbytes * ranks_per_host
    return {
        "sharding": sharding,
        "hosts": num_hosts,
        "ranks_per_host": ranks_per_host,
        "rate_mbit": rate_mbit,
        "forward_backward_ms": 1e3 * backward,
        "wire_ms": 0.0 if rate_mbit is None else sent * 8 / rate_mbit / 1e3,
        "outer_ms": 1e3 * outer,
        "exposed_ms": 1e3 * exposed,
        "losses": losses,
    }


def _worker(num_hosts: int, rates: Sequence[float | None], file: Path | None) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = [train(sharding, num_hosts, rate) for sharding in SHARDINGS for rate in rates]
    if rank == 0:
        expected = unsharded_losses(dist.get_world_size())
        for row in found:
            row["difference"] = max(abs(a - b) / b for a, b in zip(row["losses"], expected, strict=True))
            print(describe(row), flush=True)
        if file is not None:
            file.write_text(json.dumps(found) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def describe(row: dict[str, Any]) -> str:
    """Format what a run took."""
    rate = "unlimited" if row["rate_mbit"] is None else f"{row['rate_mbit']:.0f} Mbit/s"
    return (
        f"{row['sharding']:<5} {row['hosts']} hosts x {row['ranks_per_host']}, {rate:>12}: forward and backward "
        f"{row['forward_backward_ms']:6.0f} ms, wire {row['wire_ms']:5.0f}, outer reductions {row['outer_ms']:5.0f}, exposed "
        f"{row['exposed_ms']:5.0f}; losses differ by at most {row['difference']:.1e}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run all ranks on all hosts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=2)
    parser.add_argument(
        "--rate-mbit", type=float, default=200.0, help="what a host may send; it is measured without a limit too"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        _worker(args.hosts, (None, args.rate_mbit), args.json)
        return 0
    if (reason := missing_for_hosts()) is not None:
        print(f"slow_network: {reason}", file=sys.stderr)
        return 2
    given = ["--worker", "--hosts", str(args.hosts), "--rate-mbit", str(args.rate_mbit)]
    given += ["--json", str(args.json.resolve())] if args.json else []
    world_size = args.hosts * args.ranks_per_host
    with hosts(args.hosts) as names:
        processes = [
            subprocess.Popen(
                [
                    "ip",
                    "netns",
                    "exec",
                    names[rank // args.ranks_per_host],
                    sys.executable,
                    "-m",
                    "benchmarks.slow_network",
                    *given,
                ],
                env={
                    **os.environ,
                    "RANK": str(rank),
                    "WORLD_SIZE": str(world_size),
                    "MASTER_ADDR": _address(0),
                    "MASTER_PORT": str(_PORT),
                    "GLOO_SOCKET_IFNAME": _INTERFACE,
                    "OMP_NUM_THREADS": "1",
                },
            )
            for rank in range(world_size)
        ]
        try:
            statuses = [process.wait() for process in processes]
        finally:
            for process in processes:
                process.kill()
    return max(map(abs, statuses))


if __name__ == "__main__":
    sys.exit(main())
