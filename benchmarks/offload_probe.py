"""Measure what bounds a step with optimizer state in the host's memory, and compare a log of ``pretrain_gpt.py`` with it.

    python benchmarks/offload_probe.py --parameters 17.4e9 [--log train.log]

Prints the rates of copies in both directions (alone, and at once) and of updates on the host, and from them the least time of
an update of so many parameters: the copies of 4 bytes each way run beside the update, so the slowest of the three bounds it. With
a log, the mean time of its iterations after the first three is printed beside that.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

_NUMEL = 2**28  # fp32: 1 GiB, which no cache holds
_NBYTES = 4  # of an element, each way


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parameters", type=float, required=True, help="parameters of a rank whose state is on the host"
    )
    parser.add_argument("--log", type=Path, help="output of pretrain_gpt.py with --log-interval 1")
    parser.add_argument("--numel", type=int, default=_NUMEL, help="elements of the measured buffers")
    arguments = parser.parse_args(argv)
    cores = max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("RANKS", "1")))
    torch.set_num_threads(cores)
    down, up, both = _copies(arguments.numel)
    updates = _updates(arguments.numel)
    count = arguments.parameters
    times = {
        "gradients to the host": count / down,
        "weights to the device": count / up,
        "both at once": count / both,
        f"updates on {cores} cores": count / updates,
    }
    for name, seconds in times.items():
        if seconds:
            print(f"{name:<28}{count / seconds / 1e9:8.2f} G parameters/s {seconds:8.3f} s")
    least = max(times.values())
    print(f"{'least time of the updates':<28}{'':>23} {least:8.3f} s")
    if arguments.log is not None:
        _compare(arguments.log, least)


def _copies(numel: int) -> tuple[float, float, float]:
    """Return the elements of 4 bytes that are copied in a second: to the host, to the device, and each way at once."""
    if not torch.cuda.is_available():
        print("no GPU: copies are not measured")
        return float("inf"), float("inf"), float("inf")
    on_device = [torch.empty(numel, device="cuda") for _ in range(2)]
    on_host = [torch.empty(numel, pin_memory=True) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def down() -> None:
        with torch.cuda.stream(streams[0]):
            on_host[0].copy_(on_device[0], non_blocking=True)

    def up() -> None:
        with torch.cuda.stream(streams[1]):
            on_device[1].copy_(on_host[1], non_blocking=True)

    def both() -> None:
        down()
        up()

    return tuple(numel / _seconds(run, torch.cuda.synchronize) for run in (down, up, both))  # type: ignore[return-value]


def _updates(numel: int) -> float:
    """Return the parameters that torch's fused AdamW updates in a second on the host."""
    main, grad, exp_avg, exp_avg_sq = (torch.rand(numel) for _ in range(4))
    step = torch.tensor(1.0)

    def update() -> None:
        torch._fused_adamw_(
            [main], [grad], [exp_avg], [exp_avg_sq], [], [step], lr=1e-4, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8,
            amsgrad=False, maximize=False,
        )  # fmt: skip

    return numel / _seconds(update, lambda: None)


def _seconds(run: Callable[[], None], wait: Callable[[], None], times: int = 5) -> float:
    found = []
    for _ in range(times + 1):
        wait()
        begin = time.perf_counter()
        run()
        wait()
        found.append(time.perf_counter() - begin)
    return statistics.median(found[1:])


def _compare(log: Path, least: float) -> None:
    times = [float(t) / 1e3 for t in re.findall(r"elapsed time per iteration \(ms\): ([0-9.]+)", log.read_text())]
    if len(times) < 4:
        raise SystemExit(f"{log} must have more than three iterations, got {len(times)}")
    mean = statistics.mean(times[3:])
    print(f"{log}: {mean:.2f} s for an iteration, {mean / least:.2f} times the least time of the updates")


if __name__ == "__main__":
    main()
