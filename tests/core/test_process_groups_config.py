"""A collection of process groups is given, never looked up."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch.distributed as dist

from megatron.core.process_groups_config import ProcessGroupCollection
from tests.support.launch import run_ranks


def test_a_collection_is_empty_until_it_is_given_groups() -> None:
    collection = ProcessGroupCollection()
    assert all(getattr(collection, field.name) is None for field in fields(collection))
    with pytest.raises(TypeError):
        ProcessGroupCollection(None)  # type: ignore[misc]
    with pytest.raises(TypeError, match="dp_pc"):
        ProcessGroupCollection(dp_pc=None)  # type: ignore[call-arg]


def test_data_parallel_needs_torch_distributed() -> None:
    with pytest.raises(RuntimeError, match=r"must be initialised before process groups.*init_process_group\(\)"):
        ProcessGroupCollection.data_parallel()


def _data_parallel() -> tuple[bool, list[str]]:
    collection = ProcessGroupCollection.data_parallel()
    given = [field.name for field in fields(collection) if getattr(collection, field.name) is not None]
    return collection.dp is collection.dp_cp is dist.group.WORLD, given


def test_all_ranks_are_data_parallel() -> None:
    assert run_ranks(2, _data_parallel) == [(True, ["dp", "dp_cp"])] * 2
