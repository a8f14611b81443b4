"""Iteration times are those of the device, not of the host that runs ahead of it."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from megatron.training.telemetry.step_clock import DeviceClock, HostClock, make_step_clock


def test_the_host_is_its_own_clock() -> None:
    clock = make_step_clock(torch.device("cpu"))
    assert isinstance(clock, HostClock)
    begin = clock.now()
    time.sleep(0.01)
    end = clock.now()
    assert 0.01 <= clock.seconds(begin, end) < 10


@pytest.mark.gpu
def test_the_device_tells_when_work_is_done_not_when_it_was_launched() -> None:
    clock = make_step_clock(torch.device("cuda", torch.cuda.current_device()))
    assert isinstance(clock, DeviceClock)
    moments = [clock.now()]
    for _ in range(3):
        torch.cuda._sleep(100_000_000)  # some 50 ms, launched in no time
        moments.append(clock.now())
    steps = [clock.seconds(begin, end) for begin, end in itertools.pairwise(moments)]
    assert min(steps) > 0.6 * max(steps) > 0.01, steps
