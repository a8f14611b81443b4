"""Skips tests for CUDA where there are too few devices; everything else that tests share is in tests/support."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from tests.support.launch import num_simulated_hosts

torch.set_num_threads(1)


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
