"""Threads that compute with DTensors at the same time, ours or torch's, do not disturb each other."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate

from tests.support.models import make_net, shard_net
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)


def _assert_two_threads_can(work: Callable[[], object], seconds: float = 3.0) -> None:
    """Repeat ``work`` in two threads that Python switches between as often as it can."""
    errors: list[str] = []
    end, interval = time.monotonic() + seconds, sys.getswitchinterval()

    def run() -> None:
        try:
            while time.monotonic() < end and not errors:
                work()
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=run) for _ in range(2)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors, errors


def _average(parameters: Sequence[torch.Tensor]) -> None:
    """Compute what an average of weights does, out of place, in place and by lists; no operation communicates."""
    averages = [parameter.detach().clone() for parameter in parameters]
    for average, parameter in zip(averages, parameters, strict=True):
        average.copy_(average * 0.9 + parameter.detach() * 0.1)
    torch._foreach_mul_(averages, 0.5)
    torch._foreach_lerp_(averages, [parameter.detach() for parameter in parameters], 0.5)


@CHECKS.on(2)
def two_threads_average_weights_of_the_engine() -> None:
    parameters = list(shard_net(make_net(1)).parameters())
    _assert_two_threads_can(lambda: _average(parameters))


@CHECKS.on(2)
def two_threads_average_weights_of_fsdp2_beside_the_engine() -> None:
    net = make_net(1)
    torch_fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    _assert_two_threads_can(lambda: _average(list(net.parameters())))


@CHECKS.on(1)
def two_threads_compute_with_plain_dtensors() -> None:
    mesh = init_device_mesh("cpu", (1,))
    tensors: list[torch.Tensor] = [DTensor.from_local(torch.randn(4, 4), mesh, [Replicate()]) for _ in range(2)]

    def work() -> None:
        _average(tensors)
        (tensors[0] @ tensors[1]).sum()
        torch.cat(tensors)

    _assert_two_threads_can(work)


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
