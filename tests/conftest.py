"""Skips tests for CUDA where there are too few devices; everything else that tests share is in tests/support."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from tests.support.launch import num_simulated_hosts

torch.set_num_threads(1)

# The files that take longest, longest first: they start first, so that none runs alone at the end.
_SLOWEST = (
    "examples/test_quickstart.py",
    "test_docs.py",
    "training/launch/test_kill.py",
    "core/distributed/fsdp/comm/test_communicators.py",
    "core/distributed/fsdp/checkpoint/test_checkpoint.py",
    "core/distributed/fsdp/strategies/test_parity.py",
    "tools/checkpoint/test_inspect.py",
    "training/loop/test_cuda_graph.py",
    "benchmarks/test_model_speed.py",
    "training/loop/test_pipeline.py",
    "core/distributed/fsdp/strategies/test_cut_rows.py",
    "core/distributed/fsdp/runtime/test_schedule.py",
    "parity/test_matrix.py",
    "core/distributed/fsdp/dtensor/test_row_shard.py",
    "core/distributed/fsdp/runtime/test_life_cycle.py",
    "core/distributed/fsdp/runtime/test_order.py",
    "core/distributed/fsdp/flat_optimizer/test_param_remainders.py",
    "benchmarks/test_compare.py",
    "training/launch/test_resume.py",
)


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("gpu")
    if marker is not None:
        needed = marker.args[0] if marker.args else 1
        if torch.cuda.device_count() * num_simulated_hosts() < needed:
            pytest.skip(f"needs {needed} CUDA devices, found {torch.cuda.device_count()}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    places = {str(config.rootpath / "tests" / name): place for place, name in enumerate(_SLOWEST)}
    items.sort(key=lambda item: places.get(str(item.path), len(places)))
    if not config.getoption("-m"):
        skip = pytest.mark.skip(reason="slow: run with -m slow")
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(skip)
