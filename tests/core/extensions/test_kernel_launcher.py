"""Launches of a kernel: what Triton compiled is called again, or Triton's own launch each time where that is asked for."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from megatron.core.extensions import kernel_launcher
from megatron.core.extensions.kernel_launcher import KernelLauncher


class Kernel:
    """Stands in for a function under ``triton.jit`` and for what it compiles; notes the arguments of each launch."""

    def __init__(self) -> None:
        self.by_triton: list[tuple[Any, ...]] = []
        self.compiled: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self._compile if len(grid) == 1 else lambda *arguments: self.compiled.append((grid, *arguments))

    def _compile(self, *arguments: Any, num_warps: int) -> Kernel:
        self.by_triton.append(arguments)
        return self


def test_later_launches_of_a_kind_call_what_was_compiled() -> None:
    kernel, tensor = Kernel(), torch.zeros(32)
    launch = KernelLauncher(kernel, num_warps=4)
    for numel in (32, 48, 32):
        again = launch(7, (tensor, None), (numel, 0.5), (True,))
        assert again is not None
    assert [arguments[2] for arguments in kernel.by_triton] == [32]
    assert kernel.compiled == [((7, 1, 1), tensor.data_ptr(), None, numel, 0.5, True) for numel in (48, 32)]
    launch(7, (tensor, None), (33, 0.5), (True,))
    launch(7, (tensor[1:], None), (32, 0.5), (True,))
    assert len(kernel.by_triton) == 3, (
        "integers and addresses that are no multiples of 16 are compiled for by themselves"
    )


def test_the_switch_leaves_each_launch_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_launcher, "_LAUNCHES", "plain")
    kernel, tensor = Kernel(), torch.zeros(32)
    launch = KernelLauncher(kernel, num_warps=4)
    for _ in range(2):
        assert launch(7, (tensor,), (32,), ()) is None
    assert len(kernel.by_triton) == 2 and not kernel.compiled


def _run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], env={**os.environ, **environment}, capture_output=True, text=True)


def test_an_unknown_way_to_launch_is_refused() -> None:
    done = _run("-c", "import megatron.core.extensions.kernel_launcher", FSDP_TRITON_LAUNCHER="fast")
    assert "FSDP_TRITON_LAUNCHER must be cached or plain, got 'fast'" in done.stderr


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton, whose interpreter runs on a CPU")
@pytest.mark.parametrize(
    "check",
    ["comm.test_sum_pieces import _compare_kernel as c", "flat_optimizer.test_adamw_kernel import _compare as c"],
)
def test_users_are_right_with_the_switch(check: str) -> None:
    program = f"from tests.core.distributed.fsdp.{check}; c()"
    done = _run("-c", program, FSDP_TRITON_LAUNCHER="plain", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
