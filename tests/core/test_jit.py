"""A fused function runs compiled where that is possible, and as plain PyTorch, with one log line, where it is not."""

from __future__ import annotations

import logging
import shutil
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.exc import TorchDynamoException

from megatron.core import jit


@pytest.fixture
def fresh_answer() -> Iterator[None]:
    """Clear the cached answer whether this machine can compile, before and after."""
    jit._can_compile.cache_clear()
    yield
    jit._can_compile.cache_clear()


def _double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def test_on_the_cpu_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function: pytest.fail("compiled"))
    assert jit.Fusible(_double)(True, torch.ones(1)).item() == 2


def test_a_function_is_compiled_once_and_sees_values_without_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Callable[..., Any]] = []
    seen: list[bool] = []

    def compile_(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled.append(function)

        def run(x: torch.Tensor) -> torch.Tensor:
            seen.append(x.requires_grad)
            return x + 40

        return run

    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(jit, "is_compiled", lambda wanted, first: wanted)
    function = jit.Fusible(_double)
    assert [function(True, torch.ones(1, requires_grad=True)).item() for _ in range(3)] == [41, 41, 41]
    assert function(False, torch.ones(1)).item() == 2
    assert [one.__name__ for one in compiled] == ["_double"] and seen == [False] * 3
    assert compiled[0](torch.ones(1)).item() == 2


def test_each_width_has_code_of_its_own_for_any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled code has constant widths: one code for the first, another for the second."""
    sizes: list[list[Any]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        sizes.extend(list(x.shape) for x in inputs if isinstance(x, torch.Tensor))
        return graph.forward

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: compile_(function, backend=backend))
    monkeypatch.setattr(jit, "is_compiled", lambda wanted, first: wanted)
    function = jit.Fusible(_double)
    for shape in [(4, 6), (5, 6), (7, 6), (4, 8), (9, 8), (3, 10)]:
        assert torch.equal(function(True, torch.ones(shape)), torch.full(shape, 2.0))
    assert [size[1] for size in sizes] == [6, 6, 8, 8, 10], sizes
    assert all(isinstance(size[1], int) for size in sizes)


def test_where_the_compiler_fails_the_plain_function_runs_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def fail(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        raise TorchDynamoException("no kernel for this")

    monkeypatch.setattr(torch, "compile", lambda function: fail)
    monkeypatch.setattr(jit, "is_compiled", lambda wanted, first: wanted)
    function = jit.Fusible(_double)
    with caplog.at_level(logging.WARNING, logger=jit.__name__):
        assert [function(True, torch.ones(1)).item() for _ in range(3)] == [2, 2, 2]
    assert len(calls) == 1
    assert caplog.messages == [
        "_double runs without compilation from here on: torch.compile failed (TorchDynamoException: no kernel for this)"
    ]


def test_errors_of_the_function_itself_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch, "compile", lambda function: fail)
    monkeypatch.setattr(jit, "is_compiled", lambda wanted, first: wanted)
    with pytest.raises(RuntimeError, match="out of memory"):
        jit.Fusible(_double)(True, torch.ones(1))


@pytest.mark.parametrize(
    ("triton", "capability", "compiler", "reason"),
    [
        (None, (9, 0), "/usr/bin/gcc", "Triton is not installed"),
        (types.ModuleType("triton"), (6, 1), "/usr/bin/gcc", "compute capability 7.0"),
        (types.ModuleType("triton"), (9, 0), None, "a C compiler"),
        (types.ModuleType("triton"), (9, 0), "/usr/bin/gcc", None),
    ],
)
def test_what_is_missing_is_said_once(
    triton: Any,
    capability: tuple[int, int],
    compiler: str | None,
    reason: str | None,
    fresh_answer: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(shutil, "which", lambda name: compiler)
    monkeypatch.delenv("CC", raising=False)
    on_cuda: Any = types.SimpleNamespace(is_cuda=True)
    with caplog.at_level(logging.WARNING, logger=jit.__name__):
        assert {jit.is_compiled(True, on_cuda) for _ in range(3)} == {reason is None}
        assert jit.is_compiled(False, on_cuda) is False
    assert len(caplog.messages) == (reason is not None)
    assert reason is None or reason in caplog.text
