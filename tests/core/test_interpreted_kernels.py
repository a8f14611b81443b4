"""Triton's interpreter runs the kernels on the CPU: each file has its check, and all share one start of Python.

Whether Triton interprets is decided when it is imported, so that the interpreter needs a process without the other tests.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
import traceback
from typing import Any

import pytest

# Files with a function check_interpreted().
FILES = (
    "distributed.fsdp.codec.test_float8_kernel",
    "distributed.fsdp.comm.test_sum_pieces",
    "distributed.fsdp.flat_optimizer.test_adamw_kernel",
    "distributed.fsdp.flat_optimizer.test_muon_kernels",
    "distributed.fsdp.matrices.test_gram_iteration",
    "extensions.test_transformer_engine_mlp",
    "fusions.test_float8_kernels",
    "transformer.moe.test_grouped_gemm_kernels",
    "transformer.moe.test_permutation_kernels",
)


def _failure(file: str) -> str:
    try:
        importlib.import_module(f"tests.core.{file}").check_interpreted()
    except Exception:
        return traceback.format_exc()
    return ""


def _let_loaded_numbers_bound_loops() -> None:
    """Convert numbers that a kernel loaded: Triton 3.6 asks numpy to, which from 2.4 on does not take arrays of one element."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_too(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_too


def _check_all() -> None:
    """Print the failures by file; each check has a process of its own, forked from this one."""
    _let_loaded_numbers_bound_loops()
    for file in FILES:
        importlib.import_module(f"tests.core.{file}")
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        print(json.dumps({file: pool.apply(_failure, (file,)) for file in FILES}))


@functools.cache
def _failures() -> dict[str, str]:
    command = [sys.executable, "-c", f"from {__name__} import _check_all; _check_all()"]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    failures: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return failures


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("file", FILES)
def test_interpreted_kernels_compute_what_torch_computes(file: str) -> None:
    assert not _failures()[file], _failures()[file]
