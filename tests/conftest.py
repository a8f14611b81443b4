"""Skips tests for CUDA where there are too few devices, and has workers begin with the longest files."""

from __future__ import annotations

import gc
import importlib
import os
from contextlib import suppress
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from tests.support.launch import num_simulated_hosts

torch.set_num_threads(1)

_TESTS = Path(__file__).parent
# Longest first: a long file that starts last would keep one core busy alone.
_LONGEST = [
    "core/distributed/fsdp/test_situations.py",
    "test_docs.py",
    "core/distributed/fsdp/test_compiled_situations.py",
    "training/launch/test_failures.py",
    "examples/test_quickstart.py",
    "training/launch/test_fault_injection.py",
    "core/distributed/fsdp/runtime/test_public_state.py",
    "parity/test_matrix.py",
    "training/launch/test_restart.py",
    "damage/test_damage.py",
    "benchmarks/test_compare.py",
    "core/distributed/fsdp/comm/test_lost_rank.py",
    "tools/test_audit.py",
    "training/launch/test_kill.py",
    "core/distributed/fsdp/strategies/test_parity.py",
    "core/distributed/fsdp/comm/test_communicators.py",
    "training/loop/test_cuda_graph.py",
    "core/distributed/fsdp/dtensor/test_row_shard.py",
    "training/loop/test_pipeline.py",
    "tools/checkpoint/test_inspect.py",
    "benchmarks/test_model_speed.py",
    "core/distributed/fsdp/checkpoint/test_checkpoint.py",
    "core/distributed/fsdp/runtime/test_order.py",
    "core/distributed/fsdp/runtime/test_schedule.py",
    "core/distributed/fsdp/strategies/test_cut_rows.py",
    "core/distributed/fsdp/strategies/test_hybrid.py",
    "training/launch/test_pretrain.py",
    "training/launch/test_resume.py",
    "core/distributed/fsdp/flat_optimizer/test_param_remainders.py",
    "core/distributed/fsdp/api/test_optimizer.py",
    "core/distributed/fsdp/api/test_fused_adam.py",
    "core/distributed/fsdp/api/test_load_state_dict.py",
    "core/models/test_context_parallel_gpt.py",
    "core/distributed/fsdp/checkpoint/test_split_checkpoints.py",
    "core/distributed/fsdp/adapter/test_adapter.py",
    "core/distributed/fsdp/dtensor/test_row_parts.py",
    "core/distributed/fsdp/buffers/test_parameters.py",
    "benchmarks/engines/test_graphed.py",
    "core/distributed/fsdp/checkpoint/test_checkpoint_kill.py",
    "core/distributed/fsdp/checkpoint/test_damaged_checkpoints.py",
    "core/test_full_cuda_graph.py",
    "core/distributed/fsdp/test_planted_faults.py",
    "core/distributed/fsdp/test_self_audit.py",
]
assert all((_TESTS / name).exists() for name in _LONGEST), "_LONGEST must name files that exist"


def pytest_sessionstart(session: pytest.Session) -> None:
    gc.disable()  # until all tests are imported: what is there by then stays
    workerinput = getattr(session.config, "workerinput", None)
    if workerinput is None or session.config.args != session.config.getini("testpaths"):
        return
    # Each worker imports all tests. Those of one begin where those of another are not yet, and rewrite a part each.
    names = [".".join(path.relative_to(_TESTS.parent).with_suffix("").parts) for path in sorted(_TESTS.rglob("test_*.py"))]
    begin = len(names) * int(workerinput["workerid"].removeprefix("gw")) // workerinput["workercount"]
    for name in names[begin:] + names[:begin]:
        with suppress(Exception, pytest.skip.Exception):  # which collection will find again, and report
            importlib.import_module(name)


def pytest_collection_finish() -> None:
    gc.freeze()  # or each collection of garbage would look at the million objects of all modules and tests
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("gpu")
    if marker is not None:
        needed = marker.args[0] if marker.args else 1
        if torch.cuda.device_count() * num_simulated_hosts() < needed:
            pytest.skip(f"needs {needed} CUDA devices, found {torch.cuda.device_count()}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("-m"):
        skip = pytest.mark.skip(reason="slow: run with -m slow")
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(skip)
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist, which hands out files in this order
        turns = {_TESTS / name: turn for turn, name in enumerate(_LONGEST)}
        items.sort(key=lambda item: turns.get(item.path, len(turns)))
