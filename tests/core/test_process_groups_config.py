"""Process groups are passed in a collection; nothing is global."""

from __future__ import annotations

from dataclasses import fields
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from megatron.core.pipeline_parallel.schedules import (
    forward_backward_pipelining_without_interleaving,
    get_forward_backward_func,
)
from megatron.core.process_groups_config import (
    MultiModuleProcessGroupCollection,
    ProcessGroupCollection,
    create_all_gather_groups,
    group_of,
)
from tests.support.launch import run_ranks


def test_a_collection_is_empty_until_it_is_given_groups() -> None:
    collection = ProcessGroupCollection()
    assert all(getattr(collection, field.name) is None for field in fields(collection))
    with pytest.raises(TypeError):
        ProcessGroupCollection(None)  # type: ignore[call-arg]
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


def _halves() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return this rank's group of neighbours, and its group of every second rank, on 4 ranks."""
    rank = dist.get_rank()
    neighbours = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    across = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
    return neighbours, across


def _all_gather_groups() -> dict[str, Any]:
    neighbours, across = _halves()
    collection = ProcessGroupCollection(dp=dist.group.WORLD, dp_cp=across, ep=neighbours, expt_dp=across)
    found: dict[str, Any] = {}
    for name, arguments in (
        ("all ranks", {}),
        ("dense", {"pg_collection": collection}),
        ("without expert parallelism", {"for_expert_parallelism": True}),
        ("expert", {"pg_collection": collection, "for_expert_parallelism": True, "timeout": timedelta(seconds=7)}),
    ):
        made = create_all_gather_groups(**arguments)
        assert not {*made} & {dist.group.WORLD, neighbours, across}, "they are groups of their own"
        found[name] = [None if group is None else dist.get_process_group_ranks(group) for group in made]
    dense, expert = made
    assert expert is not None and dense is not expert
    assert {group._get_backend(dense._device_types[0]).options._timeout for group in made if group} == {
        timedelta(seconds=7)
    }
    return found


def test_all_gather_groups_mirror_the_data_parallel_groups() -> None:
    """Each rank makes the groups of all ranks, in one order, and gets the ones that it is in."""
    for rank, found in enumerate(run_ranks(4, _all_gather_groups)):
        across = [rank % 2, rank % 2 + 2]
        assert found == {
            "all ranks": [[0, 1, 2, 3], None],
            "dense": [across, None],
            "without expert parallelism": [[0, 1, 2, 3], None],
            "expert": [across, across],
        }


def _refused_all_gather_groups() -> None:
    neighbours = dist.new_group([0, 1])
    world = dist.group.WORLD
    for arguments, message in (
        ({"pg_collection": ProcessGroupCollection()}, "must hold a data-parallel group in dp_cp or dp, got None"),
        (
            {"pg_collection": ProcessGroupCollection(dp=world, ep=neighbours), "for_expert_parallelism": True},
            "must hold expt_dp for experts that are split over ep, got None",
        ),
        ({"nccl_comm_cfgs": {"ep_dp": {"max_ctas": 8}}}, r"must be for groups among \['dp_cp'\], got \['ep_dp'\]"),
        ({"nccl_comm_cfgs": {"dp_cp": {"max_ctas": 8}}}, "needs groups of the nccl backend, got .*gloo"),
    ):
        with pytest.raises(ValueError, match=message):
            create_all_gather_groups(**arguments)


def test_what_cannot_be_mirrored_is_refused() -> None:
    run_ranks(2, _refused_all_gather_groups)


def test_a_group_is_asked_for_by_a_name_that_exists() -> None:
    assert group_of(None, "tp") is None and group_of(ProcessGroupCollection(), "tp") is None
    with pytest.raises(AttributeError, match="tpp"):
        group_of(ProcessGroupCollection(), "tpp")


def test_a_rank_with_several_modules_finds_the_groups_of_each() -> None:
    encoder, llm = ProcessGroupCollection(), ProcessGroupCollection()
    groups = MultiModuleProcessGroupCollection({"encoder": encoder, "llm": llm}, language_model_module_name="llm")
    assert groups["encoder"] is encoder and groups.get_module_collection("llm") is llm and len(groups) == 2
    assert list(groups) == list(groups.values()) == [encoder, llm] and dict(groups.items())["llm"] is llm
    assert groups.has_language_model() and groups.get_language_model_collection() is llm
    assert groups.get_language_model_cp_size() == 1
    assert repr(groups) == "MultiModuleProcessGroupCollection(modules=[encoder, llm], language_model_module_name='llm')"
    with pytest.raises(NotImplementedError, match="stages of a pipeline must be of one model, got Multi"):
        get_forward_backward_func(schedule_pg_collection=groups)
    one = MultiModuleProcessGroupCollection({"encoder": encoder})
    assert get_forward_backward_func(schedule_pg_collection=one) is forward_backward_pipelining_without_interleaving
    for call, message in (
        (one.get_language_model_cp_size, "No language model specified"),
        (lambda: one.get_module_collection("llm"), r"one of \['encoder'\], got 'llm'"),
        (lambda: MultiModuleProcessGroupCollection({}), "cannot be empty"),
        (
            lambda: MultiModuleProcessGroupCollection({"a": encoder}, "b"),
            r"one of \['a'\], got 'b', which was not found",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
