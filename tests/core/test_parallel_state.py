"""``parallel_state``: getters of the groups that ``initialize_model_parallel`` built, and who asks them."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from megatron.core import mpu, parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_state import _NOT_SERVED, NotInitializedError, RankGenerator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.utils import get_batch_on_this_tp_rank
from tests.support.rank_checks import RankChecks
from tests.support.tiny_gpt import build_gpt

CHECKS = RankChecks(__name__)
DEGREES: list[tuple[dict[str, Any], dict[str, int]]] = [
    ({}, {"data": 2}),
    ({"tensor_model_parallel_size": 2}, {"tensor": 2, "expert_tensor": 2}),
    ({"pipeline_model_parallel_size": 2}, {"pipeline": 2}),
    ({"context_parallel_size": 2}, {"context": 2}),
    ({"expert_model_parallel_size": 2}, {"data": 2, "expert": 2}),
]
GETTERS = {
    "tensor": ("get_tensor_model_parallel_world_size", "get_tensor_model_parallel_rank"),
    "pipeline": ("get_pipeline_model_parallel_world_size", "get_pipeline_model_parallel_rank"),
    "context": ("get_context_parallel_world_size", "get_context_parallel_rank"),
    "data": ("get_data_parallel_world_size", "get_data_parallel_rank"),
    "expert": ("get_expert_model_parallel_world_size", "get_expert_model_parallel_rank"),
    "expert_tensor": ("get_expert_tensor_parallel_world_size", "get_expert_tensor_parallel_rank"),
}


def _initialize(*degrees: Any, **arguments: Any) -> ProcessGroupCollection:
    """Build groups in place of those of the check before."""
    parallel_state.destroy_model_parallel()
    return parallel_state.initialize_model_parallel(*degrees, **arguments)


def _get(name: str, *arguments: Any) -> Any:
    return getattr(mpu, name)(*arguments)


@CHECKS.on(2)
def getters_tell_the_groups_of_each_degree() -> None:
    rank = dist.get_rank()
    for degrees, sizes in DEGREES:
        parallel_state.destroy_model_parallel()
        assert not mpu.is_initialized()
        _initialize(**degrees)
        with pytest.raises(RuntimeError, match=r"call destroy_model_parallel\(\) before it"):
            parallel_state.initialize_model_parallel(**degrees)
        for axis, (size, own) in GETTERS.items():
            expected = sizes.get(axis, 1)
            assert (_get(size), _get(own)) == (expected, rank if expected == 2 else 0), (degrees, axis)
        collection = ProcessGroupCollection.use_mpu_process_groups()
        for name in ("tp", "pp", "cp", "ep", "mp", "dp", "dp_cp", "tp_cp", "tp_ep", "expt_tp", "tp_dp_cp", "tp_ep_pp"):
            assert getattr(collection, name).rank() in (0, rank), "groups of one rank are there, too"
        assert collection.intra_dp_cp is collection.dp_cp and collection.inter_dist_opt.size() == 1
        assert mpu.get_data_parallel_group(True) is collection.dp_cp
        assert mpu.get_tensor_and_data_parallel_group(with_context_parallel=True).size() == 2 // _get(
            GETTERS["pipeline"][0]
        )
        assert mpu.get_amax_reduction_group(True, True) is collection.tp_cp
        assert mpu.get_data_parallel_group_gloo() is collection.dp, "on gloo there is no other"
        assert parallel_state._DATA_PARALLEL_GROUP is collection.dp
        assert mpu.get_all_ranks().count("_") == 5


@CHECKS.on(2)
def stages_know_their_neighbours_and_embeddings() -> None:
    rank = dist.get_rank()
    _initialize(1, 2)
    assert (mpu.is_pipeline_first_stage(), mpu.is_pipeline_last_stage()) == (rank == 0, rank == 1)
    assert (mpu.get_pipeline_model_parallel_first_rank(), mpu.get_pipeline_model_parallel_last_rank()) == (0, 1)
    assert mpu.get_pipeline_model_parallel_next_rank() == mpu.get_pipeline_model_parallel_prev_rank() == 1 - rank
    assert mpu.is_rank_in_embedding_group() and mpu.get_embedding_group().size() == 2
    assert mpu.is_rank_in_position_embedding_group() is (rank == 0)
    assert (mpu.get_position_embedding_group(check_initialized=False) is None) is (rank == 1)
    assert mpu.get_tensor_model_parallel_src_rank() == rank and mpu.get_model_parallel_src_rank() == 0
    assert mpu.get_virtual_pipeline_model_parallel_world_size() is None


@CHECKS.on(2)
def stages_that_take_turns_know_which_one_is_first_and_last() -> None:
    rank = dist.get_rank()
    _initialize(1, 2, 3)
    assert (mpu.get_virtual_pipeline_model_parallel_world_size(), mpu.get_virtual_pipeline_model_parallel_rank()) == (
        3,
        0,
    )
    assert mpu.is_pipeline_first_stage() is (rank == 0), "of the ranks"
    first = [mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage) for stage in range(3)]
    last = [mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage) for stage in range(3)]
    embedding = [mpu.is_rank_in_embedding_group(ignore_virtual=False, vp_stage=stage) for stage in range(3)]
    assert (first, last) == ([rank == 0, False, False], [False, False, rank == 1])
    assert embedding == [rank == 0, False, rank == 1]
    with pytest.raises(AssertionError, match="vp_stage"):
        mpu.is_pipeline_first_stage(ignore_virtual=False)
    mpu.set_virtual_pipeline_model_parallel_rank(2)
    assert mpu.get_virtual_pipeline_model_parallel_rank() == 2


@CHECKS.on(2)
def sizes_and_ranks_that_are_set_are_told() -> None:
    _initialize(2)
    mpu.set_tensor_model_parallel_rank(rank=5)
    mpu.set_tensor_model_parallel_world_size(world_size=8)
    assert (mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()) == (5, 8)
    mpu.set_tensor_model_parallel_rank(None)
    mpu.set_tensor_model_parallel_world_size(None)
    assert (mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()) == (dist.get_rank(), 2)


@CHECKS.on(2)
def what_is_given_groups_asks_nobody() -> None:
    _initialize(2)
    x = torch.full((2, 2), float(dist.get_rank() + 1))
    assert tensor_parallel.reduce_from_tensor_model_parallel_region(x).tolist() == [[3.0, 3.0]] * 2
    assert tensor_parallel.gather_from_tensor_model_parallel_region(x).tolist() == [[1.0, 1.0, 2.0, 2.0]] * 2
    assert tensor_parallel.reduce_from_tensor_model_parallel_region(x, group=None) is x, "None says: not split"
    unsplit = build_gpt({"pg_collection": ProcessGroupCollection.data_parallel()})
    split = build_gpt()
    models: list[Any] = [unsplit, split]
    sizes = [model.decoder.layers[0].mlp.linear_fc1.weight.shape[0] for model in models]
    assert sizes == [64, 32] and split.config.tensor_model_parallel_size == 2
    model_parallel_cuda_manual_seed(7)
    assert split.embedding.rng_tracker is get_cuda_rng_tracker()
    with get_cuda_rng_tracker().fork(device=torch.device("cpu")):
        own = torch.rand(1)
    drawn = [torch.empty(1), torch.empty(1)]
    dist.all_gather(drawn, own)
    assert drawn[0] != drawn[1], "tensor-parallel ranks draw different numbers in a fork"
    with pytest.raises(ValueError, match="only the first must have pre_process=True"):
        _initialize(1, 2)
        build_gpt()


@CHECKS.on(2)
def gathers_get_groups_of_their_own() -> None:
    _initialize()
    dense, expert = parallel_state.create_all_gather_groups(for_expert_parallelism=True)
    assert dense is not mpu.get_data_parallel_group(True) and dense.size() == 2 and expert is None
    assert not parallel_state.has_separate_all_gather_group()
    with pytest.raises(AssertionError, match="pass create_all_gather_group=True"):
        parallel_state.get_data_parallel_group(with_context_parallel=True, independent_all_gather=True)
    groups = _initialize(create_all_gather_group=True)
    assert parallel_state.has_separate_all_gather_group()
    for with_context in (False, True):
        gathers = parallel_state.get_data_parallel_group(with_context, independent_all_gather=True)
        assert gathers is groups.dp_cp_ag is not groups.dp_cp
    _initialize(context_parallel_size=2, create_all_gather_group=True)
    with pytest.raises(ValueError, match="must go with with_context_parallel=True where sequences are split"):
        parallel_state.get_data_parallel_group(independent_all_gather=True)
    parallel_state.destroy_model_parallel()
    assert not parallel_state.has_separate_all_gather_group()


@CHECKS.on(2)
def groups_that_callers_make() -> None:
    rank = dist.get_rank()
    _initialize()
    pair = parallel_state.create_group([0, 1], timeout=timedelta(minutes=3), group_desc="PAIR")
    assert pair.size() == 2 and pair is not dist.group.WORLD
    alone, both = parallel_state.create_hierarchical_groups(rank, [0, 1], [1, 2], True, group_desc="CP")[0]
    assert (dist.get_process_group_ranks(alone), dist.get_process_group_ranks(both)) == ([rank], [0, 1])
    with pytest.raises(ValueError, match="multiply to the 2 ranks"):
        parallel_state.create_hierarchical_groups(rank, [0, 1], [2, 2])
    assert parallel_state.create_hybrid_dp_cp_groups(rank, [0, 1]) == {}
    parallel_state.update_pg_timeout(timedelta(seconds=45), pair)
    assert _timeout(pair) == timedelta(seconds=45) != _timeout(both)
    parallel_state.update_pg_timeout(timedelta(seconds=70))
    assert _timeout(pair) == _timeout(both) == _timeout(dist.group.WORLD) == timedelta(seconds=70)
    assert parallel_state.get_gtp_weight_remat_global_ranks() == [rank]


def _timeout(group: Any) -> timedelta:
    found: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return found


@CHECKS.on(2)
def groups_that_wrappers_and_optimizers_ask_for() -> None:
    _initialize(tensor_model_parallel_size=2)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    config, ddp_config = build_gpt({}).config, DistributedDataParallelConfig(use_distributed_optimizer=True)
    found = ProcessGroupCollection.setup_process_groups_for_ddp(None, config, ddp_config)
    assert (found["tp_group"], found["dp_group"], found["ep_group"]) == (groups.tp, groups.dp, groups.ep)
    assert found["intra_expt_dp_group"] is groups.expt_dp and found["inter_dist_opt_group"] is None
    assert not ProcessGroupCollection.is_gtp_remat_active(found) and "tp(2)" in repr(groups)
    given = ProcessGroupCollection(dp=groups.dp, tp=groups.tp)
    found = ProcessGroupCollection.setup_process_groups_for_ddp(given, config, ddp_config)
    assert found["dp_cp_group"] is found["expt_dp_group"] is groups.dp
    with pytest.raises(ValueError, match="must hold dp, got None"):
        ProcessGroupCollection.setup_process_groups_for_ddp(ProcessGroupCollection(), config, ddp_config)
    with pytest.raises(ValueError, match="None in inter_dist_opt, intra_dp_cp, intra_expt_dp"):
        hybrid = SimpleNamespace(num_distributed_optimizer_instances=2, use_distributed_optimizer=True)
        ProcessGroupCollection.setup_process_groups_for_ddp(given, config, hybrid)
    chunk = SimpleNamespace(config=config, ddp_config=ddp_config)
    found = ProcessGroupCollection.setup_process_groups_for_optimizer(None, [chunk])
    assert (found["mp_group"], found["expt_tp_pp_group"]) == (groups.mp, groups.tp_ep_pp)
    assert found["intra_dp_cp_group_gloo"] is groups.dp_cp
    with pytest.raises(ValueError, match="use_gloo_process_groups must be False"):
        ProcessGroupCollection.setup_process_groups_for_optimizer(given, [chunk])
    parallel_state.destroy_model_parallel()
    _initialize(num_distributed_optimizer_instances=2)
    replica = ProcessGroupCollection.use_mpu_process_groups().intra_dist_opt
    assert dist.get_process_group_ranks(replica) == [dist.get_rank()]


@CHECKS.on(2)
def the_first_tensor_parallel_rank_reads_for_all() -> None:
    rank, world = dist.get_rank(), cast("Any", dist.group.WORLD)
    tokens = torch.arange(6).view(2, 3)
    read = {"tokens": tokens, "labels": tokens + 1, "loss_mask": torch.ones(2, 3), "position_ids": tokens + 2}
    read_of_first: Any = get_batch_on_this_tp_rank
    common = (False, False, False, 0, world, 1, rank, 2, 3, False)
    batch = read_of_first(read if rank == 0 else {}, *common)
    assert all(torch.equal(batch[name], value) for name, value in read.items()) and batch["attention_mask"] is None
    last = read_of_first(read if rank == 0 else {}, *common, 2, False, True)
    assert last["tokens"] is None and torch.equal(last["labels"], tokens + 1)
    packed = {**read, "cu_seqlens": torch.tensor([[0, 3]], dtype=torch.int32), "max_seqlen": torch.tensor([3])}
    middle = read_of_first(packed if rank == 0 else {}, True, *common[1:], 3)
    assert middle["tokens"] is None and middle["cu_seqlens"].tolist() == [[0, 3]]
    with pytest.raises(ValueError, match="tokens and labels must have the shape"):
        read_of_first(read if rank == 0 else {}, *common[:-2], 4, False)


@CHECKS.on(2)
def all_to_all_sends_gradients_back() -> None:
    _initialize(2)
    rank, group = dist.get_rank(), mpu.get_tensor_model_parallel_group()
    x = (torch.arange(3.0) + 10 * rank).requires_grad_()
    sent = [1, 2] if rank == 0 else [2, 1]
    received = [1, 2] if rank == 0 else [2, 1]
    y = tensor_parallel.all_to_all(group, x[:, None], received, sent)
    assert y[:, 0].tolist() == ([0.0, 10.0, 11.0] if rank == 0 else [1.0, 2.0, 12.0])
    (y * (rank + 1)).sum().backward()
    assert x.grad is not None and x.grad.tolist() == ([1.0, 2.0, 2.0] if rank == 0 else [1.0, 1.0, 2.0])


@CHECKS.on(2)
def each_argument_that_is_not_served_is_refused_by_name() -> None:
    for name, (served, reason) in _NOT_SERVED.items():
        _initialize(**{name: served[-1]})
        with pytest.raises(NotImplementedError, match=f"{name} must be .* got 17: ") as caught:
            _initialize(**{name: 17})
        assert reason in str(caught.value)
    with pytest.raises(NotImplementedError, match="get_embedding_ranks must return the first rank"):
        _initialize(get_embedding_ranks=lambda ranks: [*ranks, 7])


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)


def test_without_groups_getters_say_what_to_call() -> None:
    assert not parallel_state.model_parallel_is_initialized()
    with pytest.raises(NotInitializedError, match=r"call parallel_state.initialize_model_parallel\(\)"):
        mpu.get_tensor_model_parallel_group()
    assert mpu.get_tensor_model_parallel_group(check_initialized=False) is None
    assert mpu.get_context_parallel_world_size() == mpu.get_data_parallel_rank() == 0, "as without torch.distributed"
    assert isinstance(build_gpt(), GPTModel)


def test_ranks_of_masked_axes() -> None:
    assert parallel_state.generate_masked_orthogonal_rank_groups(8, [2, 2, 2], [False, True, False]) == [
        [0, 2],
        [1, 3],
        [4, 6],
        [5, 7],
    ]
    with pytest.raises(ValueError, match="multiply to world_size"):
        parallel_state.generate_masked_orthogonal_rank_groups(8, [2, 2], [True, False])
    assert RankGenerator(2, 1, 4, 1, 1, "tp-dp").get_mask("tp-cp-dp", "tp-dp") == [True, False, True]


def test_settings_of_communicators() -> None:
    settings: dict[str, dict[str, Any]] = {}
    parallel_state.overwrite_nccl_comm_cfgs(settings, "dp", ("max_ctas", 8))
    assert settings == {"dp": {"max_ctas": 8}} and parallel_state.get_nccl_options("tp", settings) is None
    if dist.is_nccl_available():
        assert parallel_state.get_nccl_options("dp", settings).config.max_ctas == 8
    else:
        with pytest.raises(ValueError, match="torch with NCCL"):
            parallel_state.get_nccl_options("dp", settings)


def test_generated_ranks_are_those_of_the_grid() -> None:
    ranks = RankGenerator(tp=2, ep=1, dp=2, pp=2, cp=1, order="tp-cp-ep-dp-pp", rank_offset=8)
    assert ranks.get_ranks("tp") == [[8, 9], [10, 11], [12, 13], [14, 15]]
    assert ranks.get_ranks("tp-dp") == [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert RankGenerator(2, 1, 1, 2, 1, "tp-pp").get_ranks("pp") == [[0, 2], [1, 3]]
    with pytest.raises(ValueError, match="order must name the axes of several ranks, got 'tp' without pp"):
        RankGenerator(2, 1, 1, 2, 1, "tp")
