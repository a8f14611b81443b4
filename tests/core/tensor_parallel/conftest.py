"""Seed the random inputs of every test here."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_inputs_each_time() -> None:
    torch.manual_seed(5)
